"""``/health`` (is the engine alive), ``/ready`` (should it get requests), ``/ping``, ``/version``, ``/``."""

from __future__ import annotations

import msgspec
from litestar import MediaType, get, route
from litestar.handlers import HTTPRouteHandler

import treadle
from treadle_server.context import ServerContext
from treadle_server.errors import APIError

__all__ = ("handlers",)


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str
    system_fingerprint: str


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    @route(
        ["/health", "/ping"],
        http_method=["GET", "HEAD", "POST"],
        status_code=200,
        summary="Tell whether the engine is alive",
    )
    async def health() -> Status:
        context.check_alive()
        return Status("draining" if context.draining else "ok")

    @route(
        "/ready",
        http_method=["GET", "HEAD"],
        status_code=200,
        summary="Tell whether the server should get requests",
    )
    async def ready() -> Status:
        if context.draining:
            raise APIError(503, "the server is going to stop", code="draining")
        context.check_alive()
        return Status("ok")

    @get("/version", summary="Tell the version and the fingerprint")
    async def version() -> Version:
        return Version(treadle.__version__, context.fingerprint)

    @route(
        "/",
        http_method=["GET", "HEAD"],
        status_code=200,
        media_type=MediaType.TEXT,
        summary="Tell what this is",
    )
    async def root() -> str:
        return (
            f"treadle {treadle.__version__} serves {', '.join(context.names)}. "
            "GET /openapi.json describes the API.\n"
        )

    return [health, ready, version, root]
