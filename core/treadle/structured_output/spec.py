"""From what a request says about its output to a grammar's source, within bounds."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.structured_output import GrammarSpec
from treadle.errors import RequestError
from treadle.text.request_checks import check_json

__all__ = ("grammar_spec",)

MAX_REGEX, MAX_SCHEMA = 8 << 10, 64 << 10  # bytes
MAX_DEPTH = 64
MAX_CHOICES = 1024
FORMS = ("json", "json_object", "regex", "choice", "grammar")


def grammar_spec(params: StructuredOutputsParams) -> GrammarSpec:
    """The one grammar that ``params`` asks for. Raises ``RequestError`` that names the parameter."""
    forms = [name for name in FORMS if getattr(params, name) not in (None, False)]
    if len(forms) != 1:
        raise RequestError(
            f"structured output takes exactly one of {', '.join(FORMS)}; given: "
            f"{', '.join(forms) or 'none'}",
            param="structured_outputs",
        )
    options = {}
    if params.whitespace_pattern is not None:
        if not forms[0].startswith("json"):
            raise RequestError(
                f"guided_whitespace_pattern is given with {forms[0]}; it belongs to json and "
                "json_object",
                param="guided_whitespace_pattern",
            )
        _check_size("guided_whitespace_pattern", params.whitespace_pattern, MAX_REGEX)
        options["whitespace_pattern"] = params.whitespace_pattern
    match forms[0]:
        case "json":
            return GrammarSpec("json_schema", _schema(params.json), options)
        case "json_object":
            return GrammarSpec("json_object", "{}", options)
        case "regex":
            return GrammarSpec(
                "regex", _text("guided_regex", str(params.regex), MAX_REGEX), options
            )
        case "choice":
            return GrammarSpec("choice", _choices(params.choice or []), options)
    grammar = str(params.grammar)
    source = _text("guided_grammar", grammar if grammar.strip() else "", MAX_SCHEMA)
    return GrammarSpec("ebnf", source, options)


def _text(name: str, text: str, max_bytes: int) -> str:
    """Return a regex or a grammar. Raises ``RequestError`` if it is empty or beyond the bounds."""
    if not text:
        raise RequestError(f"{name} is empty", param=name)
    _check_size(name, text, max_bytes)
    if (depth := _brackets(text)) > MAX_DEPTH:
        raise RequestError(
            f"{name} is nested {depth} deep; at most {MAX_DEPTH} is allowed", param=name
        )
    return text


def _brackets(text: str) -> int:
    """The deepest nesting of brackets, also of those that stand in quotes."""
    depth = max_depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            max_depth = max(max_depth, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return max_depth


def _schema(schema: str | dict[str, Any] | None) -> str:
    if isinstance(schema, str):
        _check_size("guided_json", schema, MAX_SCHEMA)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"guided_json is not JSON: {error}", param="guided_json") from error
    if not isinstance(schema, (dict, bool)):
        raise RequestError(
            f"guided_json is {type(schema).__name__}; a JSON schema is an object",
            param="guided_json",
        )
    # Its size comes first: whatever else is done with it takes time for each of its parts.
    source = _check_size("guided_json", _encoded(schema), MAX_SCHEMA)
    check_json("guided_json", json.loads(source))
    return source


def _encoded(schema: dict[str, Any] | bool) -> str:
    try:
        return msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(
            f"guided_json cannot be written as JSON: {error}", param="guided_json"
        ) from error


def _choices(choices: list[str]) -> str:
    if not choices or len(choices) > MAX_CHOICES or not all(choices):
        raise RequestError(
            f"guided_choice has {len(choices)} entries; 1 to {MAX_CHOICES} non-empty texts are "
            "allowed",
            param="guided_choice",
        )
    return _check_size("guided_choice", json.dumps(choices, ensure_ascii=False), MAX_SCHEMA)


def _check_size(name: str, text: str, limit: int) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise RequestError(f"{name} has {size} bytes; at most {limit} are allowed", param=name)
    return text
