"""Reload parsers and routes of a running server.

The new code is imported and tested in a thread; the last step replaces references on the event loop.
Requests that are running keep their plugin manager and application.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from treadle.api.plugin_kind import FALLBACK
from treadle.errors import PluginLoadError, TreadleError
from treadle.plugins import PluginManager
from treadle.processes.watchdog import TIMEOUT_FACTOR, WatchdogExecutor
from treadle.text.parser_plugins import PARSER_KINDS
from treadle_server.app import build
from treadle_server.app_instance import AppInstance
from treadle_server.context import ServerContext
from treadle_server.plugin_reload import ReloadResult, reloaded_plugins

__all__ = ("reload",)

log = logging.getLogger("treadle.server")

RELOAD_TIMEOUT = 90.0
"""Time limit of a reload in seconds, of which the examination may take 30."""
STARTUP_TIMEOUT = 30.0
"""Time limit of the startup hooks of an application, in seconds."""


async def reload(context: ServerContext, id: str) -> ReloadResult:
    """Use the code that the distribution of ``kind:key`` has on disk now. One reload runs at a time.

    Raises the errors of ``treadle_server.plugin_reload.reloaded_plugins``; the old code then stays in use.
    """
    async with context.reloading:
        watchdog = WatchdogExecutor(RELOAD_TIMEOUT / TIMEOUT_FACTOR)
        try:
            work = partial(load_new_version, context, id, asyncio.get_running_loop())
            plugins, app, result = await watchdog.submit(work)
        except (TreadleError, TimeoutError) as error:
            log.warning("%s was not reloaded: %s", id, error)
            if isinstance(error, TreadleError):
                raise
            raise PluginLoadError(
                f"the reload of {id} hangs: {error}; the old version stays in use"
            ) from error
        finally:
            watchdog.close()
        context.use_plugins(plugins, app)
    log.info(
        "reloaded %s of %s: %s, before %s",
        ", ".join(result.plugins),
        result.distribution,
        result.version,
        result.previous_version,
    )
    return result


def load_new_version(
    context: ServerContext, id: str, loop: asyncio.AbstractEventLoop
) -> tuple[PluginManager, AppInstance | None, ReloadResult]:
    """Return the new plugin manager, tested, the new application if routes changed, and the result."""
    in_use = context.stats.plugin_states if context.stats is not None else ()
    with reloaded_plugins(context.engine.plugins, id, in_use=in_use) as (plugins, result):
        try:
            try_parsers(context, plugins, result)
            app = None
            if any(name.startswith("server:") for name in result.plugins):
                app = build(context, plugins)
                start = asyncio.run_coroutine_threadsafe(app.start(), loop)
                try:
                    start.result(STARTUP_TIMEOUT)
                except TimeoutError:
                    start.cancel()
                    raise PluginLoadError(
                        f"its startup hooks take more than {STARTUP_TIMEOUT:g} s"
                    ) from None
        except BaseException as error:  # a plugin may raise anything, a panic too
            message = (
                error if isinstance(error, TreadleError) else f"{type(error).__name__}: {error}"
            )
            raise PluginLoadError(
                f"{result.distribution} {result.version} cannot be used, {result.previous_version} stays: "
                f"{message}"
            ) from error
    return plugins, app, result


def try_parsers(context: ServerContext, plugins: PluginManager, result: ReloadResult) -> None:
    """Feed one word to each new parser, with the model's tokenizer."""
    parsers = context.parsers_from(plugins)
    for option, kind in PARSER_KINDS.items():
        ids = (id.partition(":") for id in result.plugins)
        keys = {key for owner, _, key in ids if owner == kind.name and key != FALLBACK}
        active_key = parsers.keys[option]
        if (
            active_key is not None
            and plugins.choose(kind.name, active_key).dist == result.distribution
        ):
            keys.add(active_key)
        for key in sorted(keys):
            parser, _ = parsers.open(kind, key)
            parser.feed("treadle", ())
            parser.finish()
