"""The tool parser ``granite-20b-fc``: an object behind each ``<function_call>``."""

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
    if name != "granite-20b-fc":
        return None
    from treadle_granite_20b_fc_tools.parser import Granite20bFc

    return Granite20bFc(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("tool_parsers", "granite-20b-fc") and model.template_contains(
        "<function_call>"
    ):
        return Match(100, "the chat template writes <function_call>")
    return None
