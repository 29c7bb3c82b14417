"""The tool parser ``mistral``: everything that ``[TOOL_CALLS]`` begins."""

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
    if name != "mistral":
        return None
    from treadle_mistral_tools.parser import Mistral

    return Mistral(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) != ("tool_parsers", "mistral"):
        return None
    if model.template_contains("[TOOL_CALLS]"):
        return Match(100, "the chat template writes [TOOL_CALLS]")
    if "[TOOL_CALLS]" in model.tokens:
        return Match(50, "[TOOL_CALLS] is a token of the vocabulary")
    return None
