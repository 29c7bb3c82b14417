"""Structured output by outlines-core: grammars become automata over the vocabulary."""

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
    whitespace_pattern: Annotated[
        str,
        msgspec.Meta(description="Space between the parts of a JSON text, unless a request says."),
    ] = "[ ]?"
    max_recursion_depth: Annotated[
        int, msgspec.Meta(description="How deep a schema that refers to itself is followed.", ge=0)
    ] = 3


TREADLE_OPTIONS = {"structured_output:outlines": Options}


@impl
def treadle_grammar_compiler(
    name: str, tokenizer: Tokenizer, vocab_size: int, options: Mapping[str, Any]
) -> GrammarCompiler | None:
    """Compile with outlines-core, and grammars with llguidance as outlines does."""
    if name != "outlines":
        return None
    from treadle_outlines.compiler import Compiler

    return Compiler(tokenizer, vocab_size, **options)


@impl
def treadle_match(kind: str, key: str) -> Match | None:
    """Say how early this backend is tried if no option names one."""
    if (kind, key) != ("structured_output", "outlines"):
        return None
    return Match(20, "compiles a grammar before its first token")
