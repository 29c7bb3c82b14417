"""Grammars for a forced ``tool_choice``: pieces for parsers that implement ``grammar(choice)``.

Formats with tags around their JSON need a grammar with tags in it. That is Lark with ``%json``, the
dialect of llguidance
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.api.files import Tokenizer
from treadle.api.parsers import Tool
from treadle.errors import RequestError

__all__ = (
    "ANYWHERE",
    "BLANK",
    "LINE_START",
    "arguments_rule",
    "arguments_schema",
    "free_text_rules",
    "lark_string",
    "names_one_tool",
    "names_pattern",
    "object_pattern",
    "pattern_of",
    "selected_tools",
    "tag_rule",
    "untagged_text_rules",
    "writable_tools",
)

ANYWHERE = "(?s:.*)"
LINE_START = r"(?s:.*\n)?[ \t\r\n]*"
"""Patterns of what stands before a call."""
BLANK = r"[ \t\r\n]"


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


def writable_tools(
    tools: Sequence[Tool], choice: str | Mapping[str, Any], can_write: Callable[[Tool], bool]
) -> list[Tool]:
    """Return the tools of which one must or may be called, and whose calls the format can write.

    With the choice ``auto``, others are left out that are not ``strict``. Raises ``RequestError`` for any
    other.
    """
    writable = []
    for tool in selected_tools(tools, choice):
        if can_write(tool):
            writable.append(tool)
        elif choice != "auto" or tool.strict:
            raise RequestError(
                f"the function {tool.name[:64]!r} has a name that cannot be written in the format of this "
                "model's calls; letters, digits and _ are possible in every format",
                param="tools",
            )
    return writable


def names_one_tool(choice: str | Mapping[str, Any]) -> bool:
    """Return whether exactly one call is required: of a function that the client names."""
    return not isinstance(choice, str)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, which are always an object.

    A tool without parameters takes none. Raises ``RequestError`` if its properties or the names of those that are
    required are no such thing.
    """
    properties, required = (tool.parameters.get(key) for key in ("properties", "required"))
    is_list = isinstance(required or [], list) and all(isinstance(n, str) for n in required or [])
    if not isinstance(properties or {}, Mapping) or not is_list:
        raise RequestError(
            f"the parameters of the function {tool.name[:64]!r} are no JSON schema: properties is an object, "
            "and required a list of names",
            param="tools",
        )
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


def untagged_text_rules(
    opening: str,
    calls: Sequence[tuple[str, str]],
    *,
    before: str = ANYWHERE,
    between: str = "",
    tags: Sequence[str],
    closing: str = "",
    tokenizer: Tokenizer,
) -> list[str]:
    """Return the rules of free text in which whatever reads like a call is one of ``calls``.

    For formats whose calls may begin without a tag: where ``before`` has matched, the pattern ``opening``
    begins one. Each call is its first text and the expression of its rest. Behind a call, one may follow
    that ``between`` separates from it. One of ``tags`` begins a call anywhere, and the expression
    ``closing`` ends it then.
    """
    tag_text = "|".join(map(pattern_of, tags)) or r"[^\s\S]"
    rules = [tag_rule(tag, tokenizer) for tag in tags]
    lines = [
        "start: free_text | first again* BEHIND_CALLS",
        "free_text: FREE_TEXT",
        f"FREE_TEXT: /{ANYWHERE}/ & ~/{before}{opening}{ANYWHERE}/ & ~/{ANYWHERE}({tag_text}){ANYWHERE}/",
        f"BEHIND_CALLS: FREE_TEXT & ~/{between}{opening}{ANYWHERE}/",
    ]
    firsts, agains = [], []
    for i, (head, rest) in enumerate(calls):
        start = pattern_of(head)
        lines += [
            f"rest_{i}: {rest}",
            f"FIRST_{i}: (/{before}/ & FREE_TEXT) /{start}/",
            f"AGAIN_{i}: /{between}{start}/ | ((/{before}/ & BEHIND_CALLS) /{start}/)",
            f"TAGGED_{i}: /{BLANK}*{start}/",
        ]
        firsts.append(f"FIRST_{i} rest_{i}")
        agains.append(f"AGAIN_{i} rest_{i}")
        for tag, rule in zip(tags, rules, strict=True):
            end = f"TAGGED_{i} rest_{i} {closing}"
            if rule.startswith("<["):
                firsts.append(f"FREE_TEXT {rule} {end}")
                agains.append(f"BEHIND_CALLS {rule} {end}")
                continue
            number = len(lines)
            lines += [
                f"FIRST_TAG_{number}: FREE_TEXT /{pattern_of(tag)}{BLANK}*{start}/",
                f"AGAIN_TAG_{number}: BEHIND_CALLS /{pattern_of(tag)}{BLANK}*{start}/",
            ]
            firsts.append(f"FIRST_TAG_{number} rest_{i} {closing}")
            agains.append(f"AGAIN_TAG_{number} rest_{i} {closing}")
    return [*lines, f"first: {' | '.join(firsts)}", f"again: {' | '.join(agains)}"]


def pattern_of(text: str) -> str:
    """Return a text as a part of a pattern between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def names_pattern(tools: Sequence[Tool]) -> str:
    """Return a pattern of the names of the tools."""
    return f"({'|'.join(pattern_of(tool.name) for tool in tools)})"


def object_pattern(tools: Sequence[Tool]) -> str:
    """Return a pattern of how an object begins that is a call of one of the tools, or may be one."""
    fields = rf'("(type|id)"{BLANK}*:{BLANK}*"[^"]*"{BLANK}*,{BLANK}*)*'
    name = rf'"name"{BLANK}*:{BLANK}*"{names_pattern(tools)}"'
    return rf'\{{{BLANK}*{fields}({name}|"(parameters|arguments)")'


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
