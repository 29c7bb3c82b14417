"""The tool parser ``kimi_k2``: JSON behind an id with the name."""

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
    if name != "kimi_k2":
        return None
    from treadle_kimi_k2_tools.parser import KimiK2

    return KimiK2(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("tool_parsers", "kimi_k2") and model.template_contains(
        "<|tool_calls_section_begin|>"
    ):
        return Match(100, "the chat template writes <|tool_calls_section_begin|>")
    return None
