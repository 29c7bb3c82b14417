"""The tool parser ``glm4_moe``: an element for each argument."""

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
    if name not in ("glm4_moe", "glm45"):
        return None
    from treadle_glm4_moe_tools.parser import Glm4Moe

    return Glm4Moe(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("tool_parsers", "glm4_moe") and model.template_contains("<arg_key>"):
        return Match(100, "the chat template writes <arg_key>")
    return None
