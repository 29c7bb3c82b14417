"""The hook of the server: registered on the engine's plugin host when a server starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import impl, spec

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

    from treadle_server.engine import Engine

__all__ = ("ServerHooks", "impl")


class ServerHooks:
    """Entry points in the group ``treadle.server`` implement this; all of them are called."""

    @spec
    def treadle_server(self, app: AppConfig, engine: Engine, options: Mapping[str, Any]) -> None:
        """Edit the application before it is built: routes, middleware, guards, lifespan.

        ``app.state.context`` is the ``treadle_server.context.ServerContext`` of this server. Routes added
        here are behind the API key like all others. Called again, beside what is served, when a
        server plugin is reloaded: what it opens belongs into a lifespan manager. Import litestar
        inside the body.
        """
