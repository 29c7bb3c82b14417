"""The OpenAPI document, made from the types of the handlers."""

from __future__ import annotations

from litestar import MediaType
from litestar.openapi import OpenAPIConfig, ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

import treadle
from treadle_server.config import ServerConfig
from treadle_server.errors import ErrorBody

__all__ = ("ERROR_RESPONSES", "openapi_config")

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
        render_plugins=[JsonRenderPlugin(path="/", media_type=MediaType.JSON)],
        components=Components(security_schemes={"key": bearer} if config.api_key else {}),
        security=[{"key": []}] if config.api_key else None,
    )
