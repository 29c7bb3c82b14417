"""Exchanging parsers and routes of a server that is in use.

All of it happens in a thread and beside what is served; the last step is to swap references on the
event loop. Requests that have begun keep the host and the application that they began with.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from treadle.errors import PluginLoadError, TreadleError
from treadle.plugins import PluginManager
from treadle.plugins.kinds import FALLBACK
from treadle.processes.watchdog import TIMEOUT_FACTOR, WatchdogExecutor
from treadle.text.parser_plugins import PARSER_KINDS
from treadle_server.app import build
from treadle_server.context import ServerContext
from treadle_server.exchange import Reloaded, reloaded
from treadle_server.served import AppInstance

__all__ = ("reload",)

log = logging.getLogger("treadle.server")

LONGEST = 90.0
"""Seconds that the new code gets for everything; the doctor alone may take 30 of them."""
STARTUP = 30.0
"""Seconds that the startup hooks of an application may take."""


async def reload(context: ServerContext, id: str) -> Reloaded:
    """Use the code that the distribution of ``kind:key`` has on disk now. One at a time.

    Raises the errors of ``treadle_server.exchange.reloaded``; the old code is then in use as before.
    """
    async with context.reloading:
        watchdog = WatchdogExecutor(LONGEST / TIMEOUT_FACTOR)
        try:
            work = partial(load_new_version, context, id, asyncio.get_running_loop())
            plugins, served, done = await watchdog.submit(work)
        except (TreadleError, TimeoutError) as error:
            log.warning("%s was not reloaded: %s", id, error)
            if isinstance(error, TreadleError):
                raise
            raise PluginLoadError(f"{id} does not come back: {error}; the old stays") from error
        finally:
            watchdog.close()
        context.exchange(plugins, served)
    log.info(
        "reloaded %s of %s: %s, before %s",
        ", ".join(done.plugins),
        done.distribution,
        done.version,
        done.previous_version,
    )
    return done


def load_new_version(
    context: ServerContext, id: str, loop: asyncio.AbstractEventLoop
) -> tuple[PluginManager, AppInstance | None, Reloaded]:
    """The new host, tried, and the new application if there are other routes."""
    in_use = context.stats.plugin_states if context.stats is not None else ()
    with reloaded(context.engine.plugins, id, in_use=in_use) as (plugins, done):
        try:
            try_parsers(context, plugins, done)
            served = None
            if any(name.startswith("server:") for name in done.plugins):
                served = build(context, plugins)
                start = asyncio.run_coroutine_threadsafe(served.start(), loop)
                try:
                    start.result(STARTUP)
                except TimeoutError:
                    start.cancel()
                    raise PluginLoadError(
                        f"its startup hooks take more than {STARTUP:g} s"
                    ) from None
        except BaseException as error:  # a plugin may raise anything, a panic too
            said = error if isinstance(error, TreadleError) else f"{type(error).__name__}: {error}"
            raise PluginLoadError(
                f"{done.distribution} {done.version} cannot be used, {done.previous_version} stays: "
                f"{said}"
            ) from error
    return plugins, served, done


def try_parsers(context: ServerContext, host: PluginManager, done: Reloaded) -> None:
    """Let each new parser read a word, with the tokenizer that it is for."""
    plugins = context.chat_processor.parser_plugins.with_host(host)
    for option, kind in PARSER_KINDS.items():
        ids = (id.partition(":") for id in done.plugins)
        keys = {key for owner, _, key in ids if owner == kind.name and key != FALLBACK}
        used = plugins.keys[option]
        if used is not None and host.choose(kind.name, used).dist == done.distribution:
            keys.add(used)
        for key in sorted(keys):
            plugins.check(option, key, feed=True)
