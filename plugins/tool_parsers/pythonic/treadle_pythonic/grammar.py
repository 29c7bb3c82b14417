"""The grammar of forced calls: a JSON schema's values as Python would write them.

Enforced are names, required arguments, their order and types, ``enum`` and ``const``, and the same
in the objects and lists inside; one of several schemas is any of them. Other keywords are not. In
Lark, as llguidance reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle.errors import RequestError
from treadle_parsing_kit.tool_choice import (
    arguments_schema,
    lark_string,
    names_one_tool,
    names_pattern,
    tag_rule,
    untagged_text_rules,
    writable_tools,
)

__all__ = ("python_grammar",)

MAX_DEPTH = 16
ANY = r"""
value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value (", " value)*)? "]"
dict: "{" (STRING ": " value (", " STRING ": " value)*)? "}"
STRING: /"([^"\\\x00-\x1f]|\\["\\nrt])*"/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/
"""
ANY_MEMBERS = '(/[A-Za-z_][A-Za-z0-9_]*=/ value (", " /[A-Za-z_][A-Za-z0-9_]*=/ value)*)?'
TYPES = {
    "string": "STRING",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '("True" | "False")',
    "null": '"None"',
    "array": "list",
    "object": "dict",
}


def python_grammar(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> GrammarSpec:
    """``[f(a=1)]`` of the tools that ``choice`` allows. Raises ``RequestError`` for a tool or an
    argument that Python could not name."""
    selected = writable_tools(tools, choice, _can_write)
    calls = " | ".join(f"call_{i}" for i in range(len(selected)))
    repetition = "" if names_one_tool(choice) else ' (", " call)*'
    grammar = _Grammar()
    grammar.lines = [f'start: "[" call{repetition} "]"', f"call: {calls}"]
    for i, tool in enumerate(selected):
        grammar.add_call(i, tool)
    return GrammarSpec("ebnf", "\n".join(grammar.lines) + ANY)


def text_with_lists(
    tools: Sequence[Tool], tokenizer: Tokenizer, tag: str, closing: str
) -> GrammarSpec | None:
    """Text in which a list that begins with a call of a tool is one of calls. ``None`` without such tools.

    The arguments of tools that are not ``strict`` may be any. Raises as ``python_grammar`` does.
    """
    tools = writable_tools(tools, "auto", _can_write)
    if not tools:
        return None
    grammar = _Grammar()
    for i, tool in enumerate(tools):
        grammar.add_call(i, tool, is_free=not tool.strict)
    rules = untagged_text_rules(
        rf"\[[ \t\r\n]*{names_pattern(tools)}\(",
        [(f"[{tool.name}(", f'members_{i} ")" (", " call)* "]"') for i, tool in enumerate(tools)],
        tags=[tag],
        closing=tag_rule(closing, tokenizer),
        tokenizer=tokenizer,
    )
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    return GrammarSpec("ebnf", "\n".join([*rules, f"call: {calls}", *grammar.lines]) + ANY)


class _Grammar:
    """The rules so far. ``first_N`` is the members of an object from the N-th on if none stands
    before them, ``next_N`` if one does: so each comma is where it belongs, in rules of linear size."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._num_objects = 0

    def add_call(self, i: int, tool: Tool, *, is_free: bool = False) -> None:
        schema = arguments_schema(tool)
        for name in () if is_free else _members(schema):
            if not name.isidentifier():
                raise RequestError(
                    f"the function {tool.name[:64]!r} has an argument {name[:64]!r}, which cannot be written in "
                    "the format of this model's calls; letters, digits and _ are possible",
                    param="tools",
                )
        members = ANY_MEMBERS if is_free else self._object(schema, 0, lambda name: f"{name}=")
        self.lines += [
            f"members_{i}: {members}",
            f'call_{i}: {lark_string(tool.name + "(")} members_{i} ")"',
        ]

    def _object(self, schema: Mapping[str, Any], depth: int, key: Callable[[str], str]) -> str:
        """Return the rule of an object's members, the required ones first."""
        number, self._num_objects = self._num_objects, self._num_objects + 1
        members, required = _members(schema), set(schema.get("required") or ())
        for i, (name, value) in enumerate(members.items()):
            member = f"{lark_string(key(name))} {self._value(value, depth)} next_{number}_{i + 1}"
            for rule, body in (("first", member), ("next", f'", " {member}')):
                skip = "" if name in required else f" | {rule}_{number}_{i + 1}"
                self.lines.append(f"{rule}_{number}_{i}: {body}{skip}")
        self.lines += [f'{rule}_{number}_{len(members)}: ""' for rule in ("first", "next")]
        return f"first_{number}_0"

    def _value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or "$ref" in schema:
            return "value"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return f"({' | '.join(lark_string(_literal(value)) for value in values)})"
        types = schema.get("type")
        options: Any = schema.get("anyOf") or schema.get("oneOf")
        if not options and isinstance(types, list):
            options = [{**schema, "type": type_name} for type_name in types]
        if isinstance(options, list) and options:
            return f"({' | '.join(self._value(option, depth + 1) for option in options)})"
        if types == "array" and "items" in schema:
            item = self._value(schema["items"], depth + 1)
            return f'("[" ({item} (", " {item})*)? "]")' if depth < 4 else "list"
        if types == "object" and _members(schema):
            members = self._object(schema, depth + 1, lambda name: f"{_literal(name)}: ")
            return f'("{{" {members} "}}")'
        return TYPES.get(types, "value") if isinstance(types, str) else "value"


def _can_write(tool: Tool) -> bool:
    return all(part.replace("-", "_").isidentifier() for part in tool.name.split("."))


def _members(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of an object's members, the required ones first."""
    properties = schema.get("properties") or {}
    required = list(schema.get("required") or ())
    names = dict.fromkeys((*required, *properties))
    return {name: properties.get(name, {}) for name in names}


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
