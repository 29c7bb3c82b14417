"""``treadle serve``: the HTTP server, if treadle-server is installed."""

from __future__ import annotations

import typer

from treadle.api import impl
from treadle_cli.explain import Flag, print_engine
from treadle_cli.flags import ENGINE, Options, server_group, with_flags
from treadle_cli.help import PluginOptionsCommand, single_command
from treadle_cli.offline import need_server

__all__ = ("treadle_command",)


@impl
def treadle_command(name: str) -> typer.Typer | None:
    if name != "serve":
        return None
    need_server(name)
    server = server_group()

    @with_flags(*ENGINE, server)
    def serve(
        *,
        explain: Flag = False,
        options: Options,
    ) -> None:
        """Start the HTTP server."""
        from treadle_server.config import server_from_options

        engine, config = options.engine_config(), server_from_options(options.of([server]))
        if explain:
            return print_engine(engine)
        from treadle_cli.terminal import Screen

        Screen().wait_for(engine.model.model)
        from treadle_server.run import serve as run

        run(engine, config)

    return single_command(name, serve, PluginOptionsCommand)
