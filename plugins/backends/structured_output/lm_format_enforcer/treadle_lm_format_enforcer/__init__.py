"""Structured output by lm-format-enforcer: JSON with its properties in any order, regexes, choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from treadle.api import impl
from treadle.api.types import GrammarCompiler, Match, Tokenizer

__all__ = ("TREADLE_OPTIONS", "Options", "treadle_grammar_compiler", "treadle_match")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    strict: Annotated[
        bool,
        msgspec.Meta(description="Refuse schemas with keywords that would not be enforced."),
    ] = True
    max_whitespace: Annotated[
        int, msgspec.Meta(description="Most whitespace in a row in a JSON text.", ge=0)
    ] = 12
    max_array_length: Annotated[
        int, msgspec.Meta(description="Most items of an array whose schema has no maxItems.", ge=1)
    ] = 20


TREADLE_OPTIONS = {"structured_output:lm-format-enforcer": Options}


@impl
def treadle_grammar_compiler(
    name: str, tokenizer: Tokenizer, vocab_size: int, options: Mapping[str, Any]
) -> GrammarCompiler | None:
    """Compile with lm-format-enforcer."""
    if name != "lm-format-enforcer":
        return None
    from treadle_lm_format_enforcer.compiler import Compiler

    return Compiler(tokenizer, vocab_size, **options)


@impl
def treadle_match(kind: str, key: str) -> Match | None:
    """Say how early this backend is tried if no option names one."""
    if (kind, key) != ("structured_output", "lm-format-enforcer"):
        return None
    return Match(10, "computes each mask in Python")
