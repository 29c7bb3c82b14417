"""The OpenAPI document of the server, and its page: docs/ref/openapi.json, docs/ref/http.md.

``document`` is the one that the server makes from the types of its handlers. ``reference`` is written
from the document alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from repository import ROOT

from treadle.plugins import PluginManager
from treadle_server.app import build
from treadle_server.config import ServerConfig
from treadle_server.context import ServerContext
from treadle_server.openapi import complete_document
from treadle_server.testing.engine import FakeEngine

__all__ = ("TARGET", "document", "reference", "text")

TARGET = ROOT / "docs/ref/openapi.json"
SCHEMAS = "#/components/schemas/"
Document = dict[str, Any]


def document() -> Document:
    """The document that a server without options serves at ``/openapi.json``."""
    plugins = PluginManager()
    served = build(ServerContext(FakeEngine(plugins, "model"), ServerConfig()), plugins)
    return complete_document(served.app, served.app.openapi_schema.to_schema())


def text() -> str:
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def reference() -> str:
    """Every route with its request and answer, then the parts that several of them share."""
    return "\n".join(_lines(document()))


def _lines(api: Document) -> Iterator[str]:
    schemas: Document = api["components"]["schemas"]
    listed: set[str] = set()
    for path, operations in api["paths"].items():
        methods: dict[str, list[str]] = {}
        for method in ("get", "post", "head", "put", "delete"):
            if method in operations:
                methods.setdefault(operations[method].get("summary", ""), []).append(method)
        for summary, names in methods.items():
            operation = operations[names[0]]
            yield f"### {', '.join(names).upper()} {path}\n"
            yield f"{summary.rstrip('.')}. {operation.get('description', '')}".strip()
            if failures := [s for s in operation["responses"] if s >= "400"]:
                yield f"\nErrors: {', '.join(failures)}."
            yield ""
            for title, name in _bodies(operation):
                yield f"{title}: [{name}](#{name.lower()})\n"
                if name not in listed:
                    listed.add(name)
                    yield f"#### {name}\n\n{_table(schemas[name])}"
    yield "### Shared parts\n"
    for name, schema in schemas.items():
        if name not in listed and schema.get("properties"):
            yield f"#### {name}\n\n{_table(schema)}"


def _bodies(operation: Document) -> Iterator[tuple[str, str]]:
    """The types of the request and of the answer, if they have one."""
    responses = [r for s, r in operation["responses"].items() if s < "300"]
    for title, body in (("Request", operation.get("requestBody", {})), ("Answer", responses[0])):
        schema = body.get("content", {}).get("application/json", {}).get("schema", {})
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
        options = [_kind(option) for option in field[union] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options)) or "null"
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
