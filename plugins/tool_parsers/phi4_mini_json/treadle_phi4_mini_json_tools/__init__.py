"""The tool parser ``phi4_mini_json``: a list behind ``functools``."""

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
    if name != "phi4_mini_json":
        return None
    from treadle_phi4_mini_json_tools.parser import Phi4Mini

    return Phi4Mini(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("tool_parsers", "phi4_mini_json")
        and model.template_contains("<|tool|>")
        and model.template_contains("<|/tool|>")
    ):
        return Match(100, "the chat template writes <|tool|> and <|/tool|>")
    return None
