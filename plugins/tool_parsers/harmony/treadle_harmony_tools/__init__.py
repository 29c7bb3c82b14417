"""The tool parser ``harmony``: messages to functions."""

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
    if name not in ("harmony", "openai"):
        return None
    from treadle_harmony_tools.parser import Harmony

    return Harmony(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("tool_parsers", "harmony")
        and model.template_contains("<|channel|>")
        and model.template_contains("<|message|>")
    ):
        return Match(100, "the chat template writes <|channel|> and <|message|>")
    return None
