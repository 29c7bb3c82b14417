"""Structured output by llguidance: the fastest backend, and one that never ignores a keyword."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from treadle.api import impl
from treadle.api.types import GrammarCompiler, Match, Tokenizer
from treadle_structured_output_kit.regex import JSON_WHITESPACE

__all__ = ("TREADLE_OPTIONS", "Options", "treadle_grammar_compiler", "treadle_match")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    strict: Annotated[
        bool,
        msgspec.Meta(description="Refuse schemas with keywords that would not be enforced."),
    ] = True
    whitespace_pattern: Annotated[
        str,
        msgspec.Meta(description="Space between the parts of a JSON text, unless a request says."),
    ] = JSON_WHITESPACE
    max_processes: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=64,
            description="Processes for the rows of a GPU, no more than half of the cores. 0: none.",
        ),
    ] = 8


KEYS = ("llguidance", "guidance")
"""Our name, and that of other engines, which is never chosen unless somebody asks for it."""

TREADLE_OPTIONS = {f"structured_output:{key}": Options for key in KEYS}


@impl
def treadle_grammar_compiler(
    name: str, tokenizer: Tokenizer, vocab_size: int, options: Mapping[str, Any]
) -> GrammarCompiler | None:
    """Compile with llguidance."""
    if name not in KEYS:
        return None
    from treadle_llguidance.compiler import Compiler

    return Compiler(name, tokenizer, vocab_size, **options)


@impl
def treadle_match(kind: str, key: str) -> Match | None:
    """Say how early this backend is tried if no option names one."""
    if (kind, key) != ("structured_output", "llguidance"):
        return None
    return Match(30, "the fastest, and refuses what it cannot enforce")
