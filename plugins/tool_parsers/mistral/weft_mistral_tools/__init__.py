"""The tool parser ``mistral``: everything that ``[TOOL_CALLS]`` begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.api import impl

if TYPE_CHECKING:
    from weft.api.types import Tokenizer, Tool, ToolParser

__all__ = ("weft_tool_parser",)


@impl
def weft_tool_parser(name: str, tokenizer: Tokenizer, tools: Sequence[Tool]) -> ToolParser | None:
    if name != "mistral":
        return None
    from weft_mistral_tools.parser import Mistral

    return Mistral(tokenizer, tools)
