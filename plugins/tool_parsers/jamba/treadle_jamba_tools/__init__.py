"""The tool parser ``jamba``: a list between ``<tool_calls>`` and ``</tool_calls>``."""

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
    if name != "jamba":
        return None
    from treadle_jamba_tools.parser import Jamba

    return Jamba(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("tool_parsers", "jamba") and model.template_contains("<tool_calls>"):
        return Match(100, "the chat template writes <tool_calls>")
    return None
