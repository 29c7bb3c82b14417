"""From what a request says about its output to a grammar's source, within bounds."""

from __future__ import annotations

import json
from functools import lru_cache
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
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema with an object of schemas."""
DATA = ("const", "enum", "default", "examples")


def grammar_spec(params: StructuredOutputsParams) -> GrammarSpec:
    """The one grammar that ``params`` asks for. Raises ``RequestError`` that names the parameter."""
    forms = [name for name in FORMS if getattr(params, name) not in (None, False)]
    if len(forms) != 1:
        raise RequestError(
            f"structured output takes exactly one of {', '.join(FORMS)}; given: "
            f"{', '.join(forms) or 'none'}",
            param="structured_outputs",
        )
    options = _options(params, forms[0])
    match forms[0]:
        case "json":
            schema = _schema("guided_json", params.json)
            if params.disable_additional_properties:
                schema = json.dumps(_closed(json.loads(schema)), ensure_ascii=False)
            return GrammarSpec("json_schema", schema, options)
        case "structural_tag":
            source = _schema("structural_tag", params.structural_tag)
            return GrammarSpec("structural_tag", source, options)
        case "json_object":
            return GrammarSpec("json_object", "{}", options)
        case "regex":
            source = _text("guided_regex", str(params.regex), MAX_REGEX)
            return GrammarSpec("regex", source, options)
        case "choice":
            return GrammarSpec("choice", _choices(params.choice or []), options)
    grammar = str(params.grammar)
    source = _text("guided_grammar", grammar if grammar.strip() else "", MAX_SCHEMA)
    return GrammarSpec("ebnf", source, options)


def _options(params: StructuredOutputsParams, form: str) -> dict[str, Any]:
    options: dict[str, Any] = {} if params.strict else {"strict": False}
    pattern = params.whitespace_pattern
    if params.disable_any_whitespace:
        if pattern is not None:
            raise RequestError(
                "disable_any_whitespace contradicts guided_whitespace_pattern; give one",
                param="guided_whitespace_pattern",
            )
        pattern = "" if form.startswith("json") else None
    if pattern is not None:
        if not form.startswith("json"):
            raise RequestError(
                f"guided_whitespace_pattern is given with {form}; it belongs to json and json_object",
                param="guided_whitespace_pattern",
            )
        _check_size("guided_whitespace_pattern", pattern, MAX_REGEX)
        options["whitespace_pattern"] = pattern
    return options


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS and isinstance(value, dict):
            closed[key] = {name: _closed(item) for name, item in value.items()}
        else:
            closed[key] = value if key in DATA else _closed(value)
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


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


def _schema(name: str, schema: Any) -> str:
    """Return a schema or a structural tag as JSON text. Raises ``RequestError`` if it is none."""
    if not isinstance(schema, str):
        try:
            schema = msgspec.json.encode(schema).decode()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"{name} cannot be written as JSON: {error}", param=name) from error
    return _checked(name, schema)


@lru_cache(64)  # many requests have the same
def _checked(name: str, text: str) -> str:
    # Its size comes first: whatever else is done with it takes time for each of its parts.
    _check_size(name, text, MAX_SCHEMA)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}", param=name) from error
    if not isinstance(schema, dict) and (name != "guided_json" or not isinstance(schema, bool)):
        kind = type(schema).__name__
        raise RequestError(f"{name} is {kind}; it must be a JSON object", param=name)
    check_json(name, schema)
    return msgspec.json.encode(schema).decode()


def _choices(choices: list[str]) -> str:
    if not choices or len(choices) > MAX_CHOICES or not all(choices):
        raise RequestError(
            f"guided_choice has {len(choices)} entries; allowed are 1 to {MAX_CHOICES} non-empty texts",
            param="guided_choice",
        )
    return _check_size("guided_choice", json.dumps(choices, ensure_ascii=False), MAX_SCHEMA)


def _check_size(name: str, text: str, limit: int) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise RequestError(f"{name} has {size} bytes; at most {limit} are allowed", param=name)
    return text
