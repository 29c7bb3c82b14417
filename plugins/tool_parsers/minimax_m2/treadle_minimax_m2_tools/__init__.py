"""The tool parser ``minimax_m2``: an element for each argument."""

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
    if name != "minimax_m2":
        return None
    from treadle_minimax_m2_tools.parser import MiniMaxM2

    return MiniMaxM2(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("tool_parsers", "minimax_m2") and model.template_contains(
        "<minimax:tool_call>"
    ):
        return Match(100, "the chat template writes <minimax:tool_call>")
    return None
