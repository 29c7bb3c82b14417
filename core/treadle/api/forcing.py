"""Grammars that make a model call: for parsers that answer ``grammar(choice)``.

Formats with marks around their JSON need a grammar with marks in it. That is Lark with
``%json``, the dialect of llguidance
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.files import Tokenizer
from treadle.api.parsers import Tool

__all__ = ("chosen", "json_rule", "mark", "named", "quoted", "schema_of")


def chosen(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> list[Tool]:
    """The tools of which one must be called. Raises ``ValueError`` if there is none."""
    if isinstance(choice, str):
        found = list(tools)
    else:
        name = choice["function"]["name"]
        found = [tool for tool in tools if tool.name == name]
    if not found:
        raise ValueError("there is no tool to choose from")
    return found


def named(choice: str | Mapping[str, Any]) -> bool:
    """Whether exactly one call is wanted: of a function that the client names."""
    return not isinstance(choice, str)


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object. A tool without parameters
    takes none."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"}


def json_rule(tool: Tool) -> str:
    """A Lark expression for a tool's arguments, laid out as models are taught to.

    Keywords that the library cannot enforce are an error for a tool that is ``strict`` and ignored
    otherwise, which is what the field means in the OpenAI API.
    """
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    schema = {**schema_of(tool), "x-guidance": {**layout, "lenient": not tool.strict}}
    return f"%json {json.dumps(schema)}"


def quoted(text: str) -> str:
    """A Lark string."""
    return json.dumps(text)


def mark(text: str, tokenizer: Tokenizer) -> str:
    """A Lark expression for a mark of the format: the special token of that text if there is one,
    because a grammar over characters would spell it with other tokens."""
    special = [i for i in getattr(tokenizer, "special_ids", ()) if tokenizer.token(i) == text]
    return f"<[{special[0]}]>" if special else quoted(text)
