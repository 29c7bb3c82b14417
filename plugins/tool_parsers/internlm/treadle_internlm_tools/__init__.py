"""The tool parser ``internlm``: an object between ``<|action_start|>`` and ``<|action_end|>``."""

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
    if name != "internlm":
        return None
    from treadle_internlm_tools.parser import Internlm

    return Internlm(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("tool_parsers", "internlm") and model.template_contains("<|plugin|>")
    ) or "<|plugin|>" in model.tokens:
        return Match(50, "<|plugin|> is in the chat template or the vocabulary")
    return None
