"""Guided decoding by outlines-core: grammars become automata over the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from weft.api import impl
from weft.api.types import GrammarCompiler, Tokenizer

__all__ = ("WEFT_OPTIONS", "Options", "weft_grammar_compiler")


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


WEFT_OPTIONS = {"guided:outlines": Options}


@impl
def weft_grammar_compiler(
    name: str, tokenizer: Tokenizer, vocab_size: int, options: Mapping[str, Any]
) -> GrammarCompiler | None:
    """Compile with outlines-core, and grammars with llguidance as outlines does."""
    if name != "outlines":
        return None
    from weft_guided_outlines.compiler import Compiler

    return Compiler(tokenizer, vocab_size, **options)
