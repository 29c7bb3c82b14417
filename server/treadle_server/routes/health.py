"""``/health`` (is the engine alive), ``/ready`` (should it get requests), ``/ping``, ``/version``."""

from __future__ import annotations

from typing import Any

from litestar import Response, get, route
from litestar.handlers import HTTPRouteHandler

import treadle
from treadle_server.context import Context
from treadle_server.errors import APIError
from treadle_server.routes.answers import json_answer

__all__ = ("handlers",)


def handlers(context: Context) -> list[HTTPRouteHandler]:
    @route(["/health", "/ping"], http_method=["GET", "HEAD", "POST"], status_code=200)
    async def health() -> Response[Any]:
        context.check_alive()
        return json_answer({"status": "draining" if context.draining else "ok"})

    @route("/ready", http_method=["GET", "HEAD"], status_code=200)
    async def ready() -> Response[Any]:
        if context.draining:
            raise APIError(503, "the server is going to stop", code="draining")
        context.check_alive()
        return json_answer({"status": "ok"})

    @get("/version")
    async def version() -> Response[Any]:
        return json_answer(
            {"version": treadle.__version__, "system_fingerprint": context.fingerprint}
        )

    return [health, ready, version]
