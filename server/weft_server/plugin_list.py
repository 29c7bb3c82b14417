"""The server plugin ``plugins``: ``GET /plugins``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft_server.hookspecs import impl

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

__all__ = ("weft_server",)


@impl
def weft_server(app: AppConfig) -> None:
    from weft_server.routes.plugins import handlers

    app.route_handlers.extend(handlers(app.state.context))
