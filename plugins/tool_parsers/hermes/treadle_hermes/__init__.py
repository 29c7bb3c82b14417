"""The tool parser ``hermes``: JSON between ``<tool_call>`` and ``</tool_call>``."""

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
    if name != "hermes":
        return None
    from treadle_hermes.parser import Hermes

    return Hermes(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """Others put other things between these tags: Qwen3-Coder ``<function=…>``, GLM ``<arg_key>``."""
    foreign_tags = ("<function=", "<arg_key>")
    if (kind, key) != ("tool_parsers", "hermes") or any(map(model.template_contains, foreign_tags)):
        return None
    if model.template_contains("<tool_call>") and model.template_contains("arguments"):
        return Match(100, "the chat template writes JSON between <tool_call> and </tool_call>")
    return None
