"""The tool parser ``pythonic``: a list of Python calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.api import impl

if TYPE_CHECKING:
    from weft.api.types import Tokenizer, Tool, ToolParser

__all__ = ("weft_tool_parser",)


@impl
def weft_tool_parser(name: str, tokenizer: Tokenizer, tools: Sequence[Tool]) -> ToolParser | None:
    if name != "pythonic":
        return None
    from weft_pythonic.parser import Pythonic

    return Pythonic(tokenizer, tools)
