"""The server plugin ``ollama``: the routes of Ollama under ``/api``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

__all__ = ("treadle_server",)


@impl
def treadle_server(app: AppConfig) -> None:
    from treadle_ollama.errors import error_form
    from treadle_ollama.models import model_handlers
    from treadle_ollama.routes import handlers
    from treadle_server.surfaces import set_error_form

    context = app.state.context
    app.route_handlers.extend([*handlers(context), *model_handlers(context)])
    set_error_form(app, "/api", error_form)
