"""From what a request says about its output to a grammar's source, within bounds."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.structured_output import GrammarSpec
from treadle.errors import RequestError

__all__ = ("grammar_spec",)

MAX_REGEX, MAX_SCHEMA = 8 << 10, 64 << 10  # bytes
MAX_DEPTH = 64
MAX_CHOICES = 1024
FORMS = ("json", "json_object", "regex", "choice", "grammar")


def grammar_spec(params: StructuredOutputsParams) -> GrammarSpec:
    """The one grammar that ``params`` asks for. Raises ``RequestError`` that names the parameter."""
    given = [name for name in FORMS if getattr(params, name) not in (None, False)]
    if len(given) != 1:
        raise RequestError(
            f"structured output takes exactly one of {', '.join(FORMS)}; given: "
            f"{', '.join(given) or 'none'}",
            param="structured_outputs",
        )
    options = {}
    if params.whitespace_pattern is not None:
        if not given[0].startswith("json"):
            raise RequestError(
                f"guided_whitespace_pattern is given with {given[0]}; it belongs to json and "
                "json_object",
                param="guided_whitespace_pattern",
            )
        _check_size("guided_whitespace_pattern", params.whitespace_pattern, MAX_REGEX)
        options["whitespace_pattern"] = params.whitespace_pattern
    form = given[0]
    if form == "json":
        return GrammarSpec("json_schema", _schema(params.json), options)
    if form == "json_object":
        return GrammarSpec("json_object", "{}", options)
    if form == "regex":
        return GrammarSpec("regex", _regex(str(params.regex)), options)
    if form == "choice":
        return GrammarSpec("choice", _choices(params.choice or []), options)
    return GrammarSpec("ebnf", _grammar(str(params.grammar)), options)


def _grammar(text: str) -> str:
    if not text.strip():
        raise RequestError("guided_grammar is empty", param="guided_grammar")
    _check_size("guided_grammar", text, MAX_SCHEMA)
    if (depth := _brackets(text)) > MAX_DEPTH:
        raise RequestError(
            f"guided_grammar is nested {depth} deep; at most {MAX_DEPTH} is allowed",
            param="guided_grammar",
        )
    return text


def _regex(pattern: str) -> str:
    _check_size("guided_regex", pattern, MAX_REGEX)
    if not pattern:
        raise RequestError("guided_regex is empty", param="guided_regex")
    if (depth := _brackets(pattern)) > MAX_DEPTH:
        raise RequestError(
            f"guided_regex is nested {depth} deep; at most {MAX_DEPTH} is allowed",
            param="guided_regex",
        )
    return pattern


def _brackets(text: str) -> int:
    """The deepest nesting of brackets, also of those that stand in quotes."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest


def _schema(given: str | dict[str, Any] | None) -> str:
    if isinstance(given, str):
        _check_size("guided_json", given, MAX_SCHEMA)
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"guided_json is not JSON: {error}", param="guided_json") from error
    if not isinstance(given, (dict, bool)):
        raise RequestError(
            f"guided_json is {type(given).__name__}; a JSON schema is an object",
            param="guided_json",
        )
    # Its size comes first: whatever else is done with it takes time for each of its parts.
    source = _check_size("guided_json", _encoded(given), MAX_SCHEMA)
    depth = _depth(json.loads(source))
    if depth > MAX_DEPTH:
        raise RequestError(
            f"guided_json is nested {depth} deep; at most {MAX_DEPTH} is allowed",
            param="guided_json",
        )
    return source


def _encoded(schema: dict[str, Any] | bool) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(
            f"guided_json cannot be written as JSON: {error}", param="guided_json"
        ) from error


def _depth(value: Any) -> int:
    """Nesting of a JSON value, found without recursion."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, depth = stack.pop()
        deepest = max(deepest, depth)
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        stack.extend((child, depth + 1) for child in inner)
    return deepest


def _choices(choices: list[str]) -> str:
    if not choices or len(choices) > MAX_CHOICES or not all(choices):
        raise RequestError(
            f"guided_choice has {len(choices)} entries; 1 to {MAX_CHOICES} non-empty texts are "
            "allowed",
            param="guided_choice",
        )
    return _check_size("guided_choice", json.dumps(choices, ensure_ascii=False), MAX_SCHEMA)


def _check_size(name: str, text: str, most: int) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise RequestError(f"{name} has {size} bytes; at most {most} are allowed", param=name)
    return text
