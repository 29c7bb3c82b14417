"""Grammars for a forced ``tool_choice``: pieces for parsers that implement ``grammar(choice)``.

Formats with tags around their JSON need a grammar with tags in it. That is Lark with ``%json``, the
dialect of llguidance
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.files import Tokenizer
from treadle.api.parsers import Tool

__all__ = (
    "arguments_rule",
    "arguments_schema",
    "free_text_rules",
    "lark_string",
    "names_one_tool",
    "selected_tools",
    "tag_rule",
)


def selected_tools(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> list[Tool]:
    """Return the tools of which one must be called. Raises ``ValueError`` if there is none."""
    if isinstance(choice, str):
        selected = list(tools)
    else:
        name = choice["function"]["name"]
        selected = [tool for tool in tools if tool.name == name]
    if not selected:
        raise ValueError("there is no tool to choose from")
    return selected


def names_one_tool(choice: str | Mapping[str, Any]) -> bool:
    """Return whether exactly one call is required: of a function that the client names."""
    return not isinstance(choice, str)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, which are always an object.

    A tool without parameters takes none.
    """
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"}


def arguments_rule(tool: Tool, choice: str | Mapping[str, Any] = "required") -> str:
    """Return a Lark expression for a tool's arguments, laid out as models are trained to.

    With the choice ``auto`` those of a tool that is not ``strict`` are any object.

    Keywords that the library cannot enforce are an error for a tool that is ``strict`` and ignored
    otherwise, which is what the field means in the OpenAI API.
    """
    layout = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    is_free = choice == "auto" and not tool.strict
    object_schema = {"type": "object"} if is_free else arguments_schema(tool)
    schema = {**object_schema, "x-guidance": {**layout, "lenient": not tool.strict}}
    return f"%json {json.dumps(schema)}"


def free_text_rules(tag: str, rest: str, tokenizer: Tokenizer) -> list[str]:
    """Return the rules of free text in which each ``tag`` is followed by ``rest``.

    The grammar of ``tool_choice`` ``auto``: who is asked for it knows it by the rule ``free_text``.
    """
    rule = tag_rule(tag, tokenizer)
    if rule.startswith("<["):
        start, free = f"start: free_text ({rule} {rest} free_text)*", "/(?s:.*)/"
        return [start, "free_text: FREE_TEXT", f"FREE_TEXT: {free}"]
    pattern = re.escape(tag).replace("/", r"\/")
    free = f"(/(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/)"
    return [
        f"start: (TEXT_BEFORE_CALL {rest})* free_text",
        "free_text: FREE_TEXT",
        f"TEXT_BEFORE_CALL: {free} /{pattern}/",
        f"FREE_TEXT: {free}",
    ]


def lark_string(text: str) -> str:
    """Return ``text`` as a Lark string."""
    return json.dumps(text)


def tag_rule(text: str, tokenizer: Tokenizer) -> str:
    """Return a Lark expression for a tag: the special token of that text, if there is one.

    A grammar over characters would spell a special token with other tokens.
    """
    special = [
        i for i in getattr(tokenizer, "special_token_ids", ()) if tokenizer.id_to_token(i) == text
    ]
    return f"<[{special[0]}]>" if special else lark_string(text)
