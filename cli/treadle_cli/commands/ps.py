"""``treadle ps``: the servers that run on this machine."""

from __future__ import annotations

import importlib.util
import time
from typing import Annotated

import msgspec
import typer

from treadle.api import impl
from treadle_cli.help import single_command
from treadle_cli.table import age, table

__all__ = ("ps", "treadle_command")


def ps(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the servers of this user that run on this machine.

    Requests are those that were answered; those that run and those that wait follow.
    """
    servers = []
    if importlib.util.find_spec("treadle_server") is not None:
        from treadle_server.running import running_servers

        servers = sorted(running_servers(), key=lambda server: server.started)
    if json:
        print(msgspec.json.format(msgspec.json.encode(servers)).decode())
        return
    if not servers:
        print("no server is running")
        return
    rows = [
        (
            str(server.pid),
            ", ".join(server.models),
            server.url,
            age(time.time() - server.started),
            f"{server.finished} + {server.running} + {server.waiting}",
        )
        for server in servers
    ]
    print(table(("PID", "MODEL", "ADDRESS", "UP", "REQUESTS"), rows))


@impl
def treadle_command(name: str) -> typer.Typer | None:
    return single_command(name, ps) if name == "ps" else None
