"""The OpenAPI document of the server, and its page: docs/ref/openapi.json, docs/ref/http.md.

``document`` is the one that the server makes from the types of its handlers, with descriptions for
the fields that have none there. ``reference`` is written from the document alone.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

from repository import ROOT

from treadle.plugins import PluginManager
from treadle_server.app import build
from treadle_server.config import ServerConfig
from treadle_server.context import ServerContext
from treadle_server.testing.engine import FakeEngine

__all__ = ("TARGET", "document", "reference", "text")

TARGET = ROOT / "docs/ref/openapi.json"
DESCRIPTIONS = ROOT / "docs/data/http_fields.toml"
SCHEMAS = "#/components/schemas/"
Document = dict[str, Any]


def document() -> Document:
    """The OpenAPI document, with a description for each field that has one anywhere."""
    plugins = PluginManager()
    served = build(ServerContext(FakeEngine(plugins, "model"), ServerConfig()), plugins)
    schema_document: Document = served.app.openapi_schema.to_schema()
    known = descriptions()
    for owner, schema in schema_document["components"]["schemas"].items():
        special = known.get(owner, {})
        for name, field in schema.get("properties", {}).items():
            if not field.get("description") and (meaning := special.get(name, known.get(name))):
                field["description"] = meaning
    # litestar keeps the paths of a handler in a set, whose order differs from process to process.
    schema_document["paths"] = dict(sorted(schema_document["paths"].items()))
    return schema_document


def descriptions() -> dict[str, Any]:
    """What fields mean, by name: those of the sampling parameters, and those of our own file, which
    may say something else for one type."""
    from documents import SAMPLING, STRUCTURED_OUTPUTS  # which imports this module for its page

    fields: dict[str, Any] = tomllib.loads(DESCRIPTIONS.read_text())["fields"]
    return SAMPLING | STRUCTURED_OUTPUTS | fields


def text() -> str:
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def reference() -> str:
    """Every route with its request and answer, then the parts that several of them share."""
    return "\n".join(_lines(document()))


def _lines(api: Document) -> Iterator[str]:
    schemas: Document = api["components"]["schemas"]
    shown: set[str] = set()
    for path, operations in api["paths"].items():
        methods = [m for m in operations if m in ("get", "post", "head", "put", "delete")]
        operation = operations[methods[0]]
        yield f"### {', '.join(methods).upper()} {path}\n"
        yield f"{operation.get('summary', '').rstrip('.')}. {operation.get('description', '')}".strip()
        if failures := [s for s in operation["responses"] if s >= "400"]:
            yield f"\nErrors: {', '.join(failures)}."
        yield ""
        for title, name in _bodies(operation):
            yield f"{title}: [{name}](#{name.lower()})\n"
            if name not in shown:
                shown.add(name)
                yield f"#### {name}\n\n{_table(schemas[name])}"
    yield "### Shared parts\n"
    for name, schema in schemas.items():
        if name not in shown and schema.get("properties"):
            yield f"#### {name}\n\n{_table(schema)}"


def _bodies(operation: Document) -> Iterator[tuple[str, str]]:
    """The types of the request and of the answer, if they have one."""
    answers = [r for s, r in operation["responses"].items() if s < "300"]
    for title, part in (("Request", operation.get("requestBody", {})), ("Answer", answers[0])):
        schema = part.get("content", {}).get("application/json", {}).get("schema", {})
        if "$ref" in schema:
            yield title, schema["$ref"].removeprefix(SCHEMAS)


def _table(schema: Document) -> str:
    from documents import table

    required = set(schema.get("required", ()))
    rows = (
        (f"`{name}`" + (" *" if name in required else ""), _kind(f), f.get("description", ""))
        for name, f in schema.get("properties", {}).items()
    )
    return table(("Field", "Type", ""), rows)


def _kind(field: Document) -> str:
    """The type of a field in words, with links to parts."""
    if "$ref" in field:
        name = field["$ref"].removeprefix(SCHEMAS)
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf"):
        if union not in field:
            continue
        arms = [_kind(arm) for arm in field[union] if arm.get("type") != "null"]
        return " or ".join(dict.fromkeys(arms)) or "null"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    match field.get("type"):
        case "array":
            return f"list of {_kind(field.get('items', {}))}"
        case "object":
            return "object"
        case "null":
            return "`null`"
        case None:
            return "any"
        case list() as names:
            return " or ".join(n for n in names if n != "null")
        case name:
            return {"integer": "whole number", "string": "text", "boolean": "true or false"}.get(
                str(name), str(name)
            )
