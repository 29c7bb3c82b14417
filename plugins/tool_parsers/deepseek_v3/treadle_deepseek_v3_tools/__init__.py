"""The tool parser ``deepseek_v3``: JSON in a fence, behind the name."""

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
    if name != "deepseek_v3":
        return None
    from treadle_deepseek_v3_tools.parser import DeepSeekV3

    return DeepSeekV3(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("tool_parsers", "deepseek_v3")
        and model.template_contains("<｜tool▁calls▁begin｜>")
        and model.template_contains("```json")
    ):
        return Match(100, "the chat template writes calls in fences behind <｜tool▁sep｜>")
    return None
