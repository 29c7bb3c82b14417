"""The tool parser ``xlam``: a list without tags."""

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
    if name != "xlam":
        return None
    from treadle_xlam_tools.parser import Xlam

    return Xlam(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("tool_parsers", "xlam") and model.template_contains("xLAM"):
        return Match(100, "the chat template names xLAM")
    return None
