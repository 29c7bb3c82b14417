"""The grammar of forced calls: a JSON schema's values as Python would write them.

Enforced are names, required arguments, their order and types, ``enum`` and ``const``; other
keywords are not. In Lark, as llguidance reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.types import GrammarSpec, Tool
from treadle_parsing_kit.tool_choice import (
    arguments_schema,
    lark_string,
    names_one_tool,
    selected_tools,
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
    """``[f(a=1)]`` of the tools that ``choice`` allows. Raises ``ValueError`` for a tool or an
    argument that Python could not name."""
    selected = selected_tools(tools, choice)
    calls = " | ".join(f"call_{i}" for i in range(len(selected)))
    repetition = "" if names_one_tool(choice) else ' (", " call)*'
    lines = [f'start: "[" call{repetition} "]"', f"call: {calls}"]
    for i, tool in enumerate(selected):
        lines += _call(f"{i}", tool)
    return GrammarSpec("ebnf", "\n".join(lines) + ANY)


def _call(key: str, tool: Tool) -> list[str]:
    """The rules of one tool. ``first_N`` is the arguments from the N-th on if none stands before
    them, ``next_N`` if one does: so each comma is where it belongs, in rules of linear size."""
    schema = arguments_schema(tool)
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    names = [name for name in properties if name in required]
    names += [name for name in properties if name not in required]
    for name in (*tool.name.split("."), *names):
        if not name.replace("-", "_").isidentifier() or (name in names and "-" in name):
            raise ValueError(f"{name!r} is not a name in Python")
    lines = [f'call_{key}: {lark_string(tool.name + "(")} first_{key}_0 ")"']
    for i, name in enumerate(names):
        argument = f"{lark_string(name + '=')} {_value(properties[name], 0)}"
        rules = {
            "first": f"{argument} next_{key}_{i + 1}",
            "next": f'", " {argument} next_{key}_{i + 1}',
        }
        for rule, body in rules.items():
            skip = "" if name in required else f" | {rule}_{key}_{i + 1}"
            lines.append(f"{rule}_{key}_{i}: {body}{skip}")
    return [*lines, f'first_{key}_{len(names)}: ""', f'next_{key}_{len(names)}: ""']


def _value(schema: Any, depth: int) -> str:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH or "$ref" in schema:
        return "value"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return f"({' | '.join(lark_string(_literal(value)) for value in values)})"
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list) and options:
            return f"({' | '.join(_value(option, depth + 1) for option in options)})"
    types = schema.get("type")
    if isinstance(types, list) and types:
        options = [{**schema, "type": type_name} for type_name in types]
        return f"({' | '.join(_value(option, depth + 1) for option in options)})"
    if types == "array" and "items" in schema:
        item = _value(schema["items"], depth + 1)
        return f'("[" ({item} (", " {item})*)? "]")' if depth < 4 else "list"
    return TYPES.get(types, "value") if isinstance(types, str) else "value"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
