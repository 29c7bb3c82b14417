"""A page for chatting and for watching the engine, at ``/ui``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api.hookspecs import impl

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

__all__ = ("treadle_server",)


@impl
def treadle_server(app: AppConfig) -> None:
    from treadle_web_ui.routes import handlers

    app.route_handlers.extend(handlers())
