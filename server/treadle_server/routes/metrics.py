"""``GET /metrics``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from litestar import MediaType, Request, Response, get
from litestar.handlers import HTTPRouteHandler

from treadle.errors import EngineDeadError
from treadle_server.context import ServerContext

__all__ = ("handlers",)

TIMEOUT_FACTOR = 0.5
"""Seconds that a scrape waits for fresh numbers."""


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    @get(
        "/metrics",
        media_type=MediaType.TEXT,
        opt={"other_media_type": "application/openmetrics-text"},
        summary="Tell the values of all metrics to Prometheus",
    )
    async def metrics(request: Request[Any, Any, Any]) -> Response[Any]:
        with suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(
                TIMEOUT_FACTOR
            ):  # a long step: the numbers before it will do
                context.stats = await context.engine.stats(TIMEOUT_FACTOR)
        stats = context.stats if context.engine.alive else None
        context.metrics.stuck_threads = sum(
            executor.num_stuck for executor in context.engine.parser_watchdog.values()
        )
        context.metrics.stored_responses = len(context.responses)
        context.metrics.stored_response_bytes = context.responses.num_bytes
        page, media_type = context.metrics.exposition(
            stats,
            context.engine.plugins.states(),
            context.app_instance.metric_names,
            request.headers.get("accept", ""),
        )
        if media_type.startswith("text/"):  # litestar adds the charset to a text
            media_type = media_type.removesuffix("; charset=utf-8")
        return Response(page, media_type=media_type, status_code=200)

    return [metrics]
