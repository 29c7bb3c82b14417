"""The tool parser ``deepseek_v31``: JSON behind the name."""

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
    if name != "deepseek_v31":
        return None
    from treadle_deepseek_v31_tools.parser import DeepSeekV31

    return DeepSeekV31(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("tool_parsers", "deepseek_v31")
        and model.template_contains("<｜tool▁calls▁begin｜>")
        and not model.template_contains("```json")
    ):
        return Match(100, "the chat template writes calls as name<｜tool▁sep｜>JSON")
    return None
