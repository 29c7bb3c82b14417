"""``GET /metrics``."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import CONTENT_TYPE_LATEST

from weft.engine.stats import EngineStats
from weft.errors import WeftError
from weft_server.context import Context
from weft_server.routes.health import PATIENCE

__all__ = ("handlers",)


def handlers(context: Context) -> list[HTTPRouteHandler]:
    @get("/metrics")
    async def metrics() -> Response[Any]:
        stats: EngineStats | None = None
        try:
            async with asyncio.timeout(PATIENCE):
                stats = await context.engine.stats()
        except (WeftError, TimeoutError):
            pass  # weft_engine_up 0 says it; the server's own numbers are still worth reading
        return Response(
            context.metrics.exposition(stats), media_type=CONTENT_TYPE_LATEST, status_code=200
        )

    return [metrics]
