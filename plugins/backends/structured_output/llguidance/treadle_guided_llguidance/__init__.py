"""Guided decoding by llguidance: the fastest backend, and one that never ignores a keyword."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from treadle.api import impl
from treadle.api.types import GrammarCompiler, Tokenizer

__all__ = ("TREADLE_OPTIONS", "Options", "treadle_grammar_compiler")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    strict: Annotated[
        bool,
        msgspec.Meta(description="Refuse schemas with keywords that would not be enforced."),
    ] = True
    # Enough for any layout, but never without end, which is where a model at a loss goes.
    whitespace_pattern: Annotated[
        str,
        msgspec.Meta(description="Space between the parts of a JSON text, unless a request says."),
    ] = r"[ \t]|\r?\n[ \t]{0,64}"


TREADLE_OPTIONS = {"guided:llguidance": Options}


@impl
def treadle_grammar_compiler(
    name: str, tokenizer: Tokenizer, vocab_size: int, options: Mapping[str, Any]
) -> GrammarCompiler | None:
    """Compile with llguidance."""
    if name != "llguidance":
        return None
    from treadle_guided_llguidance.compiler import Compiler

    return Compiler(tokenizer, vocab_size, **options)
