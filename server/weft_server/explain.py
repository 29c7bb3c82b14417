"""``weft serve --explain``: the choices of the engine, and of the server around it."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config import EngineConfig
from weft.engine.explain import Explained, decided, explain
from weft.frontend.opening import open_checkpoint, plugin_config
from weft.plugins import Host
from weft_server.config import ServerConfig
from weft_server.matching import PARSERS, choose_parser

__all__ = ("explain_server",)


def explain_server(engine: EngineConfig, server: ServerConfig) -> Iterator[Explained]:
    """Starts nothing and reads no weights. Raises what a start would raise."""
    host = Host(plugin_config(engine))
    opened = open_checkpoint(engine, host)
    yield from explain(engine, host, opened)
    for option, kind in PARSERS.items():
        found = choose_parser(option, server, host, opened.traits)
        yield decided(host, option.replace("_", "-"), kind, found)
