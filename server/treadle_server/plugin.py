"""The server's own plugin: ``/tokenize``, ``/detokenize`` and ``/tokenizer_info`` through the hook that others use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle_server.hookspecs import impl

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

__all__ = ("treadle_server",)


@impl
def treadle_server(app: AppConfig) -> None:
    from treadle_server.routes.tokenize import handlers

    app.route_handlers.extend(handlers(app.state.context))
