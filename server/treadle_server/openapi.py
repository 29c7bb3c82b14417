"""The OpenAPI document, made from the types of the handlers."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from litestar import MediaType, Request
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

import treadle
from treadle_server.config import ServerConfig
from treadle_server.errors import ErrorBody

__all__ = ("ERROR_RESPONSES", "complete_document", "openapi_config")

PATH = "/openapi.json"
ERRORS = {
    400: "The request is wrong; `param` names the field",
    404: "There is no such model",
    429: "The queue is full; try again later",
    500: "The request failed; others are not affected",
    503: "The server cannot answer now",
    504: "The request took longer than the server allows",
}
ERROR_RESPONSES = {
    status: ResponseSpec(ErrorBody, description=text, generate_examples=False)
    for status, text in ERRORS.items()
}


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


def complete_document(document: dict[str, Any]) -> dict[str, Any]:
    """Return litestar's document with its paths sorted and a description for every known field.

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
    return document | {"paths": dict(sorted(document["paths"].items()))}


class _JsonDocument(JsonRenderPlugin):
    """Serves the complete document as JSON."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return self.render_json(request, complete_document(openapi_schema))
