"""Guided decoding by lm-format-enforcer: JSON with its properties in any order, regexes, choices."""

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
    max_whitespace: Annotated[
        int, msgspec.Meta(description="Most whitespace in a row in a JSON text.", ge=0)
    ] = 12
    max_array_length: Annotated[
        int, msgspec.Meta(description="Most items of an array whose schema has no maxItems.", ge=1)
    ] = 20


WEFT_OPTIONS = {"guided:lmfe": Options}


@impl
def weft_grammar_compiler(
    name: str, tokenizer: Tokenizer, vocab_size: int, options: Mapping[str, Any]
) -> GrammarCompiler | None:
    """Compile with lm-format-enforcer."""
    if name != "lmfe":
        return None
    from weft_guided_lmfe.compiler import Compiler

    return Compiler(tokenizer, vocab_size, **options)
