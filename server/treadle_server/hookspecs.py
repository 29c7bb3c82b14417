"""The kind of plugins that the server declares: they edit its application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api.hookspecs import impl, spec
from treadle.api.plugin_kind import PluginKind

if TYPE_CHECKING:
    from litestar.config.app import AppConfig

    from treadle_server.engine import Engine

__all__ = ("SERVER", "ServerHooks", "impl")


class ServerHooks:
    """Entry points in the group ``treadle.server`` implement this; all of them are called."""

    @spec
    def treadle_server(self, app: AppConfig, engine: Engine, options: Mapping[str, Any]) -> None:
        """Edit the application before it is built: routes, middleware, guards, lifespan.

        A plugin that serves another API imports its parts from ``treadle_server.surfaces``.
        ``app.state.context`` is the ``treadle_server.context.ServerContext`` of this server. Routes added
        here are behind the API key, unless their handlers say ``opt={"public": True}`` and their path has
        no parameters: that is for files and states that are the same for everybody. Called again, beside what is served, when a
        server plugin is reloaded: what it opens belongs into a lifespan manager. Import litestar
        inside the body.
        """


SERVER: PluginKind[None] = PluginKind(
    name="server",
    key="name",
    hook="treadle_server",
    builds=None,
    specs=ServerHooks,
    mode="always",
    suite="treadle_server.testing.plugins:ServerSuite",
    owner="treadle-server",
)
