"""The OpenAPI document of the server, and its page: docs/ref/openapi.json, docs/ref/http.md.

``document`` makes the first from the types of the requests and answers, ``reference`` the second
from the document alone, so that each can change without the other.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec
from repository import ROOT

import treadle
from treadle_server.errors import ErrorBody
from treadle_server.wire import chat, completions, models, tokenize

__all__ = ("TARGET", "document", "reference", "text")

TARGET = ROOT / "docs/ref/openapi.json"
DESCRIPTIONS = ROOT / "docs/data/http_fields.toml"
SCHEMAS = "#/components/schemas/"
Document = dict[str, Any]

# method, path, summary, request, answer, chunk of a stream
ROUTES: tuple[tuple[str, str, str, Any, Any, Any], ...] = (
    (
        "post",
        "/v1/chat/completions",
        "Answer a conversation, whole or as a stream.",
        chat.ChatRequest,
        chat.ChatCompletion,
        chat.ChatChunk,
    ),
    (
        "post",
        "/v1/completions",
        "Complete one prompt or many, given as text or as token ids.",
        completions.CompletionRequest,
        completions.Completion,
        completions.Completion,
    ),
    ("get", "/v1/models", "List the names that requests may use.", None, models.ModelList, None),
    ("get", "/v1/models/{name}", "Describe one of them.", None, models.ModelCard, None),
    (
        "post",
        "/tokenize",
        "Turn a text or a conversation into token ids.",
        tokenize.TokenizeRequest,
        tokenize.Tokenized,
        None,
    ),
    (
        "post",
        "/detokenize",
        "Turn token ids into text.",
        tokenize.DetokenizeRequest,
        tokenize.Detokenized,
        None,
    ),
    (
        "get",
        "/plugins",
        "List every plugin with its id, distribution, version and state.",
        None,
        None,
        None,
    ),
    (
        "post",
        "/plugins/{id}/reload",
        "Replace the code of a parser or a route while the server runs. Needs an administrator's key.",
        None,
        None,
        None,
    ),
    (
        "get",
        "/health",
        "200 if the engine responds, 503 otherwise. Needs no key. `/ping` is the same.",
        None,
        None,
        None,
    ),
    (
        "get",
        "/ready",
        "As `/health`, and 503 as soon as the server is about to stop. Needs no key.",
        None,
        None,
        None,
    ),
    (
        "get",
        "/metrics",
        "[Metrics](metrics.md) in the text format of Prometheus.",
        None,
        None,
        None,
    ),
    (
        "get",
        "/version",
        "The version of treadle, and the fingerprint of this server.",
        None,
        None,
        None,
    ),
)


def document() -> Document:
    """The OpenAPI document, with a description for each field that has one anywhere."""
    types = {t for route in ROUTES for t in route[3:] if t is not None} | {ErrorBody}
    ordered = sorted(types, key=lambda t: t.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=SCHEMAS + "{name}")
    known = descriptions()
    for owner, schema in schemas.items():
        special = known.get(owner, {})
        for name, field in schema.get("properties", {}).items():
            if "description" not in field and (meaning := special.get(name, known.get(name))):
                field["description"] = meaning
    paths: Document = {}
    for method, path, summary, request, answer, chunk in ROUTES:
        operation: Document = {"summary": summary, "responses": {}}
        if request is not None:
            operation["requestBody"] = {"required": True, "content": body(request)}
        content = body(answer) if answer is not None else {}
        if chunk is not None:
            content["text/event-stream"] = {"schema": {"$ref": SCHEMAS + chunk.__name__}}
        operation["responses"]["200"] = {"description": "Success"} | (
            {"content": content} if content else {}
        )
        operation["responses"]["default"] = {"description": "Error", "content": body(ErrorBody)}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "treadle", "version": treadle.__version__},
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def body(struct: Any) -> Document:
    return {"application/json": {"schema": {"$ref": SCHEMAS + struct.__name__}}}


def descriptions() -> dict[str, Any]:
    """What fields mean, by name: those of the sampling parameters, and those of our own file, which
    may say something else for one type."""
    from documents import GUIDED, SAMPLING  # which imports this module for its page

    fields: dict[str, Any] = tomllib.loads(DESCRIPTIONS.read_text())["fields"]
    return SAMPLING | GUIDED | fields


def text() -> str:
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


def reference() -> str:
    """Every route with its request and answer, then the parts that several of them share."""
    return "\n".join(_lines(document()))


def _lines(api: Document) -> Iterator[str]:
    schemas: Document = api["components"]["schemas"]
    shown: set[str] = set()
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            yield f"### {method.upper()} {path}\n\n{operation['summary']}\n"
            for title, media in _bodies(operation):
                name = media["schema"]["$ref"].removeprefix(SCHEMAS)
                yield f"{title}: [{name}](#{name.lower()})\n"
                if name not in shown:
                    shown.add(name)
                    yield f"#### {name}\n\n{_table(schemas[name])}"
    yield "### Shared parts\n"
    for name, schema in schemas.items():
        if name not in shown and schema.get("properties"):
            yield f"#### {name}\n\n{_table(schema)}"


def _bodies(operation: Document) -> Iterator[tuple[str, Document]]:
    if "requestBody" in operation:
        yield "Request", operation["requestBody"]["content"]["application/json"]
    content = operation["responses"]["200"].get("content", {})
    if "application/json" in content:
        yield "Answer", content["application/json"]
    if "text/event-stream" in content:
        yield "Chunk of a stream", content["text/event-stream"]


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
    if "anyOf" in field:
        arms = [_kind(arm) for arm in field["anyOf"] if arm.get("type") != "null"]
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
