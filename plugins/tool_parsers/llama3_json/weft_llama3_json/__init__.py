"""The tool parser ``llama3_json``: bare JSON objects, as Llama 3 writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.api import impl

if TYPE_CHECKING:
    from weft.api.types import Tokenizer, Tool, ToolParser

__all__ = ("weft_tool_parser",)


@impl
def weft_tool_parser(name: str, tokenizer: Tokenizer, tools: Sequence[Tool]) -> ToolParser | None:
    if name != "llama3_json":
        return None
    from weft_llama3_json.parser import Llama3

    return Llama3(tokenizer, tools)
