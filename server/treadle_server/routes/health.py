"""``/health`` (is the engine alive), ``/ready`` (should it get requests), ``/ping``, ``/version``, ``/``."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import MediaType, Request, Response, get, route
from litestar.handlers import HTTPRouteHandler

import treadle
from treadle_server.context import ServerContext
from treadle_server.errors import APIError

__all__ = ("handlers",)


PUBLIC = {"public": True}
PAGE = "/ui"
"""Where a plugin may serve a page for people."""


class Status(msgspec.Struct, omit_defaults=True):
    """``degraded`` is a server that answers although some of its plugins fail."""

    status: str
    plugins: list[str] = []


class Version(msgspec.Struct):
    version: str
    system_fingerprint: str


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    @route(
        ["/health", "/ping"],
        http_method=["GET", "HEAD", "POST"],
        status_code=200,
        opt=PUBLIC,
        summary="Tell whether the engine is alive",
    )
    async def health() -> Status:
        context.check_alive()
        context.check_outcomes()
        plugins = context.broken_plugins()
        status = "draining" if context.draining else "degraded" if plugins else "ok"
        return Status(status, plugins)

    @route(
        "/ready",
        http_method=["GET", "HEAD"],
        status_code=200,
        opt=PUBLIC,
        summary="Tell whether the server should get requests",
    )
    async def ready() -> Status:
        if context.draining:
            raise APIError(503, "the server is going to stop", code="draining")
        context.check_alive()
        context.check_outcomes()
        return Status("ok")

    @get("/version", summary="Tell the version and the fingerprint")
    async def version() -> Version:
        return Version(treadle.__version__, context.fingerprint)

    @route(
        "/",
        http_method=["GET", "HEAD"],
        status_code=200,
        opt=PUBLIC,
        media_type=MediaType.TEXT,
        summary="Tell what this is; send a browser to the page of a plugin, if there is one",
    )
    async def root(request: Request[Any, Any, Any]) -> Response[str]:
        has_page = ("GET", PAGE) in context.app_instance.public_routes
        if has_page and "text/html" in request.headers.get("accept", ""):
            location = (context.config.root_path or ".") + PAGE
            return Response("", status_code=307, headers={"location": location})
        return Response("This is treadle. GET /openapi.json describes the API.\n")

    return [health, ready, version, root]
