"""``/health`` (is the engine alive), ``/ready`` (should it get requests), ``/ping``, ``/version``."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Response, get, route
from litestar.handlers import HTTPRouteHandler

import weft
from weft_server.context import Context
from weft_server.errors import APIError
from weft_server.routes.answers import json_answer

__all__ = ("PATIENCE", "alive", "handlers")

PATIENCE = 5.0
"""Seconds after which an engine that says nothing about its health counts as ill."""


def handlers(context: Context) -> list[HTTPRouteHandler]:
    @route(["/health", "/ping"], http_method=["GET", "POST"], status_code=200)
    async def health() -> Response[Any]:
        await alive(context)
        return json_answer({"status": "draining" if context.draining else "ok"})

    @get("/ready")
    async def ready() -> Response[Any]:
        if context.draining:
            raise APIError(503, "the server is going to stop", code="draining")
        await alive(context)
        return json_answer({"status": "ok"})

    @get("/version")
    async def version() -> Response[Any]:
        return json_answer({"version": weft.__version__})

    return [health, ready, version]


async def alive(context: Context) -> None:
    """Raise unless the engine says that it is well."""
    if context.dead is not None:
        raise context.dead
    try:
        async with asyncio.timeout(PATIENCE):
            await context.engine.health()
    except TimeoutError:
        raise APIError(
            503, f"the engine did not answer within {PATIENCE:g} s", code="engine_stuck"
        ) from None
