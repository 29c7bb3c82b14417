"""The tool parser ``granite``: a list behind ``<|tool_call|>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits

if TYPE_CHECKING:
    from treadle.api.types import Tokenizer, Tool, ToolParser

__all__ = ("treadle_match", "treadle_tool_parser")


@impl
def treadle_tool_parser(
    name: str, tokenizer: Tokenizer, tools: Sequence[Tool]
) -> ToolParser | None:
    if name != "granite":
        return None
    from treadle_granite_tools.parser import Granite

    return Granite(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("tool_parsers", "granite")
        and model.template_contains("<|start_of_role|>")
        and model.template_contains("<|tool_call|>")
    ):
        return Match(100, "the chat template writes <|start_of_role|> and <|tool_call|>")
    return None
