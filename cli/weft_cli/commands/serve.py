"""``weft serve``: the HTTP server, if weft-server is installed."""

from __future__ import annotations

import importlib.util

import typer

from weft.api import impl
from weft.errors import PluginNotFoundError
from weft_cli.explain import Flag, print_choices
from weft_cli.flags import ENGINE, Options, server_group, with_flags
from weft_cli.help import PluginOptionsCommand, single

__all__ = ("weft_command",)


@impl
def weft_command(name: str) -> typer.Typer | None:
    if name != "serve":
        return None
    if importlib.util.find_spec("weft_server") is None:
        raise PluginNotFoundError("weft serve needs the server; install weft-server")
    server = server_group()

    @with_flags(*ENGINE, server)
    def serve(
        *,
        explain: Flag = False,
        options: Options,
    ) -> None:
        """Start the HTTP server."""
        from weft_server.config import server_from_options

        engine, config = options.engine_config(), server_from_options(options.of([server]))
        if explain:
            from weft_server.explain import explain_server

            return print_choices(explain_server(engine, config))
        from weft_server.run import serve as run

        run(engine, config)

    return single(name, serve, PluginOptionsCommand)
