"""What answers requests, around a started engine. ``run`` imports it while the engine starts."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from litestar.concurrency import set_asyncio_executor

from treadle.text.parser_plugins import PARSER_KINDS
from treadle_server.banner import banner
from treadle_server.config import ServerConfig
from treadle_server.context import ServerContext
from treadle_server.engine import Engine
from treadle_server.lifecycle import Lifecycle
from treadle_server.listen import url_of
from treadle_server.running import published
from treadle_server.signals import Signals

if TYPE_CHECKING:
    from treadle_server.threads import DaemonThreadPool

__all__ = ("create_lifecycle", "run_lifecycle")


def create_lifecycle(
    engine: Engine,
    config: ServerConfig,
    bound: socket.socket,
    signals: Signals,
    threads: DaemonThreadPool,
) -> Lifecycle:
    """Build the application; in a thread, as plugins edit it. ``threads`` run handlers that block."""
    set_asyncio_executor(cast("ThreadPoolExecutor", threads))
    context = ServerContext(engine, config)
    parsers = context.chat_processor.parser_plugins
    for option, key in parsers.keys.items():
        if key is not None:  # a wrong name stops the start, and not a request
            parsers.open(PARSER_KINDS[option], key)
    return Lifecycle(context, bound, signals)


async def run_lifecycle(lifecycle: Lifecycle, config: ServerConfig, bound: socket.socket) -> None:
    """Serve until a signal or the death of the engine, as one of the servers of this machine."""
    context = lifecycle.context
    url = url_of(config, bound)
    async with published(context, url):
        await lifecycle.run(banner(context, url))
