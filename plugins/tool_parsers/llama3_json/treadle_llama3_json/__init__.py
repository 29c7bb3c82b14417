"""The tool parser ``llama3_json``: bare JSON objects, as Llama 3 writes them."""

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
    if name != "llama3_json":
        return None
    from treadle_llama3_json.parser import Llama3

    return Llama3(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """The templates of Llama 3.1 to 3.3, which describe the call to the model."""
    if (kind, key) != ("tool_parsers", "llama3_json"):
        return None
    if model.template_contains('": dictionary of argument name and its value'):
        return Match(100, 'the chat template asks for {"name": …, "parameters": …}')
    return None
