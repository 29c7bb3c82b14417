"""The tool parser ``hermes``: JSON between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.api import impl

if TYPE_CHECKING:
    from weft.api.types import Tokenizer, Tool, ToolParser

__all__ = ("weft_tool_parser",)


@impl
def weft_tool_parser(name: str, tokenizer: Tokenizer, tools: Sequence[Tool]) -> ToolParser | None:
    if name != "hermes":
        return None
    from weft_hermes.parser import Hermes

    return Hermes(tokenizer, tools)
