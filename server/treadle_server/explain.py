"""``treadle serve --explain``: the choices of the engine, and of the server around it."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config import EngineConfig
from treadle.entrypoints.explain import Explained, decided, explain
from treadle.plugins import PluginManager
from treadle.text.assets import open_checkpoint, plugin_config
from treadle_server.config import ServerConfig
from treadle_server.matching import PARSERS, choose_parser

__all__ = ("explain_server",)


def explain_server(engine: EngineConfig, server: ServerConfig) -> Iterator[Explained]:
    """Starts nothing and reads no weights. Raises what a start would raise."""
    host = PluginManager(plugin_config(engine))
    opened = open_checkpoint(engine, host)
    yield from explain(engine, host, opened)
    for option, kind in PARSERS.items():
        found = choose_parser(option, server, host, opened.traits)
        yield decided(host, option.replace("_", "-"), kind.name, found)
