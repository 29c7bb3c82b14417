"""The OpenAPI document, made from the types of the handlers."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from litestar import Litestar, MediaType, Request
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.routes import HTTPRoute

import treadle
from treadle_server.app_instance import public_routes
from treadle_server.config import ServerConfig
from treadle_server.errors import ErrorBody

__all__ = (
    "CONFLICT",
    "ERROR_RESPONSES",
    "UPLOAD",
    "complete_document",
    "error_responses",
    "openapi_config",
)

PATH = "/openapi.json"
ERRORS = {
    400: "The request is wrong; `param` names the field",
    404: "There is no such model",
    429: "The queue is full; try again later",
    500: "The request failed; others are not affected",
    503: "The server cannot answer now",
    504: "The request took longer than the server allows",
}


def error_responses(errors: Mapping[int, str]) -> dict[int, ResponseSpec]:
    """Describe errors of a route, by status and text."""
    return {
        status: ResponseSpec(ErrorBody, description=text, generate_examples=False)
        for status, text in errors.items()
    }


ERROR_RESPONSES = error_responses(ERRORS)
CONFLICT = error_responses({409: "It cannot be done in the present state"})
EVERYWHERE = {
    400: ERRORS[400],
    403: "The host, the web origin or the key may not be used for this",
    503: ERRORS[503],
}
"""What the gateway answers before a route is reached, and an engine that has died."""
WITH_KEY = {401: "The key is missing or wrong"}
WITH_BODY = {413: "The body is too large", 415: "The body has a type that is not accepted"}
UPLOAD = error_responses(WITH_BODY)
"""The form of an upload is read as it arrives, and litestar does not know that there is a body."""


def openapi_config(config: ServerConfig) -> OpenAPIConfig:
    """Return what serves the document at ``/openapi.json``."""
    bearer = SecurityScheme(type="http", scheme="bearer")
    return OpenAPIConfig(
        title="treadle",
        version=treadle.__version__,
        description="The OpenAI-compatible API of a treadle server.",
        path=PATH,
        render_plugins=[_JsonDocument(path="/", media_type=MediaType.JSON)],
        components=Components(security_schemes={"key": bearer} if config.api_key else {}),
        security=[{"key": []}] if config.api_key else None,
    )


def complete_document(app: Litestar, document: dict[str, Any]) -> dict[str, Any]:
    """Return litestar's document of ``app`` with its paths sorted, and with what litestar does not know:
    a description for every known field, the errors of all routes, and which need no key.

    litestar keeps the paths of a handler in a set, whose order differs from process to process.
    """
    table = files("treadle_server").joinpath("field_descriptions.toml").read_text(encoding="utf-8")
    descriptions: dict[str, Any] = tomllib.loads(table)["fields"]
    for type_name, schema in document["components"]["schemas"].items():
        own_descriptions = descriptions.get(type_name, {})
        for name, field in schema.get("properties", {}).items():
            description = own_descriptions.get(name, descriptions.get(name))
            if description and not field.get("description"):
                field["description"] = description
    public, others = frozenset(public_routes(app)), dict(_other_media_types(app))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_public = (method.upper(), path) in public
            _complete_operation(operation, "{" in path, is_public)
            if (media_type := others.get((method.upper(), path))) is not None:
                operation["responses"]["200"]["content"][media_type] = {}
    return document | {"paths": dict(sorted(document["paths"].items()))}


def _other_media_types(app: Litestar) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield what else than JSON or text handlers answer with, by method and path.

    They say ``opt={"other_media_type": ...}``: a stream, for example, whose events are not described.
    """
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                if media_type := handler.opt.get("other_media_type"):
                    yield from (((m, route.path), str(media_type)) for m in handler.http_methods)


def _complete_operation(operation: dict[str, Any], names_one: bool, is_public: bool) -> None:
    """Add the errors that an operation may answer with, in the form that it has for errors.

    litestar says 400 of its own where there is a parameter, in a form that is never sent.
    """
    responses = operation["responses"]
    content = responses.get("400", {}).get("content", {})
    if "$ref" not in content.get("application/json", {}).get("schema", {}):
        responses.pop("400", None)
        reference = {"$ref": "#/components/schemas/ErrorBody"}
        content = {"application/json": {"schema": reference}}
    errors = dict(EVERYWHERE)
    if is_public:
        operation["security"] = []
    else:
        errors |= WITH_KEY
    if names_one:
        errors[404] = "There is nothing of this name"
    if "requestBody" in operation:
        errors |= WITH_BODY
    for status, text in errors.items():
        responses.setdefault(str(status), {"description": text, "content": content})
    operation["responses"] = dict(sorted(responses.items()))


class _JsonDocument(JsonRenderPlugin):
    """Serves the complete document as JSON."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return self.render_json(request, complete_document(request.app, openapi_schema))
