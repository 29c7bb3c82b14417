"""The tool parser ``qwen3_coder``: an element for each argument."""

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
    if name not in ("qwen3_coder", "qwen3_xml"):
        return None
    from treadle_qwen3_coder_tools.parser import Qwen3Coder

    return Qwen3Coder(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("tool_parsers", "qwen3_coder") and model.template_contains("<function="):
        return Match(100, "the chat template writes <function=")
    return None
