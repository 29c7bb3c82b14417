"""Structured output by xgrammar, for those who ask for it by name."""

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


TREADLE_OPTIONS = {"structured_output:xgrammar": Options}


@impl
def treadle_grammar_compiler(
    name: str, tokenizer: Tokenizer, vocab_size: int, options: Mapping[str, Any]
) -> GrammarCompiler | None:
    """Compile with xgrammar."""
    if name != "xgrammar":
        return None
    from treadle_xgrammar.compiler import Compiler

    return Compiler(tokenizer, vocab_size, **options)


@impl
def treadle_match(kind: str, key: str) -> Match | None:
    """Match nothing: its import takes seconds, which nobody should wait for who has not asked for it."""
    return None
