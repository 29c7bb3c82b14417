"""The tool parser ``pythonic``: a list of Python calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits

if TYPE_CHECKING:
    from treadle.api.types import Tokenizer, Tool, ToolParser

__all__ = ("treadle_match", "treadle_tool_parser")

_call = re.compile(r"\[\s*func\w*\(\s*\w+\s*=")


@impl
def treadle_tool_parser(
    name: str, tokenizer: Tokenizer, tools: Sequence[Tool]
) -> ToolParser | None:
    if name not in ("pythonic", "llama4_pythonic"):
        return None
    from treadle_pythonic.parser import Pythonic

    return Pythonic(tokenizer, tools)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """The templates for Llama 3.2 and 4 and ToolACE show a list: ``[func_name1(params_name1=…``.

    Those of Llama 4 that ask for JSON are left to ``llama3_json``: it is what they are answered.
    """
    if (kind, key) != ("tool_parsers", "pythonic"):
        return None
    if any(_call.search(template) for template in model.templates.values()):
        return Match(100, "the chat template shows calls as [name(argument=value)]")
    if "<|python_start|>" in model.tokens:
        return Match(50, "<|python_start|> is a token of the vocabulary")
    return None
