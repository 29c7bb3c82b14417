"""Reads the values of arguments in formats that write a text without quotes, and any other value as JSON.

A value that may be a text or something else is a text, unless it reads as something else that the schema allows.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle_structured_output_kit.plain_values import canonical, matches

__all__ = ("Options", "read_value", "takes_text", "types_in", "values_of")

Options = Sequence[Mapping[str, Any]]
"""Schemas without references and parts, of which a value matches one."""


def values_of(option: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, ``None`` if it lists none."""
    values = [option["const"]] if "const" in option else option.get("enum")
    return values if isinstance(values, list) else None


def types_in(option: Mapping[str, Any]) -> list[str]:
    names = option.get("type")
    names = [names] if isinstance(names, str) else names
    return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


def takes_text(option: Mapping[str, Any]) -> bool:
    return "string" in types_in(option)


def read_value(text: str, options: Options) -> Any:
    """Return the value that ``text`` means where one of ``options`` holds: JSON or, as models write it too, a
    literal of Python, and itself where texts are allowed and nothing else that it could be."""
    if any(isinstance(v, str) and v == text for option in options for v in values_of(option) or ()):
        return text
    if options and all(types_in(option) == ["string"] for option in options):
        return text
    value = _parsed(text)
    is_typed = all(types_in(option) or values_of(option) is not None for option in options)
    if not is_typed or not any(values_of(o) is None and takes_text(o) for o in options):
        return value
    return text if isinstance(value, str) or not _is_one_of(value, options) else value


def _is_one_of(value: Any, options: Options) -> bool:
    for option in options:
        values = values_of(option)
        if values is not None and canonical(value) not in map(canonical, values):
            continue
        if not types_in(option) or matches({"type": option["type"]}, value):
            return True
    return False


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        word = text.strip()
        return ast.literal_eval(word) if word in ("True", "False", "None") else text
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
