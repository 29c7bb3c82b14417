"""What of a JSON schema xgrammar enforces: it warns of some of the rest on standard error, and of some not.

Found by the examples of ``tools/schema_keywords.py`` and the instances of MaskBench, with xgrammar 0.2.8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from treadle.api.types import Tokenizer
from treadle_structured_output_kit.dialect import ascii_classes
from treadle_structured_output_kit.drafts import map_children
from treadle_structured_output_kit.formats import FORMATS, dates_as_patterns
from treadle_structured_output_kit.json_schema import ASSERTIONS, disjoint, subschemas, types_of

__all__ = ("prepared", "refusal", "tag_refusal")

IGNORED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "additionalItems",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
LENGTHS = ("minLength", "maxLength")
MAX_LENGTH = 1000
"""Characters; compiling takes time with its square."""
PLAIN = r'[^"\\\x00-\x1f]'
"""A character that a JSON text has as it is. The library leaves the others out by itself, but not where a
repeat has many counts."""
FEW = 20
COUNTS = re.compile(r"\{(\d+)(?:,(\d*))?\}")
WIDE = re.compile(r"(?<!\\)\.|\[\^|\\[SWD]")
# Where one of these stands, the library looks at nothing else, or not at all of it.
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
NOT_FORMATS = frozenset(
    {"regex", "idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template"}
)


def prepared(schema: Any) -> Any:
    """Return a schema that means the same to the library: it takes dates that no calendar has, control
    characters, which are no JSON, in texts with a length, and for spaces what only JavaScript takes for some."""
    return _texts(dates_as_patterns(schema))


def _texts(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    new = map_children(schema, _texts)
    if new.get("type") == "string" and not new.keys() & {"pattern", "format"}:
        least, most = new.get("minLength", 0), new.get("maxLength")
        if (least or most is not None) and least <= MAX_LENGTH and (most or 0) <= MAX_LENGTH:
            new = {k: v for k, v in new.items() if k not in LENGTHS}
            new["pattern"] = f"^{PLAIN}{{{int(least)},{'' if most is None else int(most)}}}$"
    elif isinstance(new.get("pattern"), str):
        new["pattern"] = ascii_classes(new["pattern"], "s")
    return new


def refusal(schema: Any) -> str | None:
    """Return why the library would not enforce ``schema``, or ``None``."""
    for path, subschema in subschemas(prepared(schema)):
        if isinstance(subschema, Mapping) and (reason := _reason(subschema)) is not None:
            return f"{reason}, at {path}, cannot be enforced"
    return None


def tag_refusal(source: str, tokenizer: Tokenizer) -> str | None:
    """Return why a structural tag cannot be enforced: special tokens are no text to the library."""
    for name in map(tokenizer.id_to_token, tokenizer.special_token_ids):
        if name and json.dumps(name, ensure_ascii=False)[1:-1] in source:
            return f"the special token {name} in a structural tag cannot be enforced"
    return None


def _reason(schema: Mapping[str, Any]) -> str | None:
    keywords = ASSERTIONS & schema.keys()
    if ignored := sorted(IGNORED & keywords):
        return ", ".join(ignored)
    shape = next((name for name in ALONE if name in keywords), None)
    if shape is not None:
        if others := sorted(keywords - {shape}):
            return _beside(shape, schema, others)
        if shape == "oneOf" and not disjoint(schema["oneOf"]):
            return "oneOf whose options may overlap"
        if shape == "allOf" and len(schema["allOf"]) != 1:
            return "allOf"
        return _values(shape, schema)
    return _typed(schema, keywords)


def _typed(schema: Mapping[str, Any], keywords: frozenset[str]) -> str | None:
    if len(keywords & {"pattern", "format", "minLength", "maxLength"}) > 1 and (
        keywords & {"pattern", "format"}
    ):
        return "a pattern or format with another rule for the text"
    if schema.get("format") in NOT_FORMATS and schema["format"] in FORMATS:
        return f"the format {schema['format']}"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not (pattern.startswith("^") and pattern.endswith("$")):
        return "a pattern without anchors around it"
    if isinstance(pattern, str) and _counts_many(pattern):
        return f"a pattern that counts more than {FEW} characters, quotes among them,"
    if schema.get("type") == "string" and keywords & set(LENGTHS):
        return f"a text with a length of more than {MAX_LENGTH} characters"
    if missing := [x for x in schema.get("required", ()) if x not in schema.get("properties", {})]:
        return f"required of {missing[0]!r:.60}, which is no property"
    if "multipleOf" in schema and schema.get("type") != "integer":
        return "multipleOf of numbers that are not whole"
    if "type" not in schema and keywords:
        return f"{', '.join(sorted(keywords))} without a type"
    if isinstance(schema.get("type"), list) and keywords - {"type"}:
        return "several types with other rules"
    return None


def _counts_many(pattern: str) -> bool:
    """Whether a pattern counts beyond ``FEW`` what may be a quote or a control character."""
    counts = [int(count) for found in COUNTS.finditer(pattern) for count in found.groups() if count]
    return (
        not pattern.startswith(f"^{PLAIN}{{")
        and WIDE.search(pattern) is not None
        and max(counts, default=0) > FEW
    )


def _beside(shape: str, schema: Mapping[str, Any], others: list[str]) -> str | None:
    """``type`` beside values that all have it says nothing more."""
    if shape in ("enum", "const") and others == ["type"]:
        values = schema["enum"] if shape == "enum" else [schema["const"]]
        allowed, found = types_of({"type": schema["type"]}), types_of({"enum": values})
        if allowed is not None and found is not None and found <= allowed:
            return _values(shape, schema)
    return f"{', '.join(others)} beside {shape}"


def _values(shape: str, schema: Mapping[str, Any]) -> str | None:
    if shape == "$ref" and not (schema["$ref"] == "#" or schema["$ref"].startswith("#/")):
        return "$ref to anything but a path in the schema"
    values = schema["enum"] if shape == "enum" else [schema.get("const")]
    if any(isinstance(value, (dict, list)) for value in values):
        return "objects and lists as values"
    return None
