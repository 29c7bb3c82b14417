"""``GET /plugins``: what ``weft plugin list`` shows, as this server sees it while it runs."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from weft.plugins.listing import Row, rows
from weft_server.context import BIG, Context
from weft_server.routes.answers import json_answer

__all__ = ("handlers",)


def handlers(context: Context) -> list[HTTPRouteHandler]:
    @get("/plugins")
    async def plugins() -> Response[Any]:
        # The metadata of every distribution is read: not on the event loop.
        found: list[Row] = await context.off_loop(BIG, lambda: list(rows(context.engine.host)))
        states = context.stats.plugin_states if context.stats is not None else {}
        return json_answer(
            {
                "object": "list",
                "system_fingerprint": context.fingerprint,
                "data": [shown(row, states) for row in found],
            }
        )

    return [plugins]


def shown(row: Row, states: dict[str, str]) -> dict[str, str]:
    """A row with the state in the engine, where most plugins are loaded; paths stay inside."""
    told = msgspec.structs.asdict(row)
    del told["target"]
    return {**told, "state": states.get(f"{row.kind}:{row.key}", row.state)}
