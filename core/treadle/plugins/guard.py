"""Attribution of failures: what a plugin raises becomes an error that names it.

The kind decides what a failure costs: stat loggers and extensions are no longer called after repeated failures; a
logits processor or parser fails its request; anything that computes fails the step.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Any, NoReturn

from treadle.api.plugin_kind import MethodRules, PluginKind
from treadle.errors import PluginError, TreadleError
from treadle.plugins.call_stats import CallCounter, PluginCallStats
from treadle.plugins.entries import Entry
from treadle.processes.failure import is_for_process, strict_error
from treadle.processes.watchdog import RETRY_SECONDS

__all__ = ("MAX_CONSECUTIVE_FAILURES", "PluginGuard")

log = logging.getLogger("treadle.plugins")

MAX_CONSECUTIVE_FAILURES = 3
"""Consecutive failures after which a plugin that fails alone is called once in ``RETRY_SECONDS``."""


class PluginGuard:
    """Names the plugin of ``entry`` in what its hooks and objects raise, and counts their calls.

    A manager has one for each plugin. ``strikes`` are the failures since the last success of a
    plugin that fails alone; if they were too many, it is not called before ``retry_time``.
    """

    __slots__ = ("_is_fatal", "_stats", "entry", "is_strict", "kind", "retry_time", "strikes")

    def __init__(
        self,
        entry: Entry,
        kind: PluginKind[Any],
        stats: PluginCallStats,
        *,
        is_strict: bool = False,
    ) -> None:
        self.entry, self.kind, self.is_strict = entry, kind, is_strict
        self.strikes = 0
        self.retry_time = 0.0
        self._stats = stats
        self._is_fatal = is_strict and kind.failure == "request"

    def counter(self, method: str) -> CallCounter:
        """Return the counter of a hook or method."""
        return self._stats.counter(self.kind, self.entry.id, method)

    def fail(
        self,
        method: str,
        error: BaseException,
        *,
        in_step: bool = True,
        start_time: float | None = None,
        error_class: type[TreadleError] | None = None,
    ) -> NoReturn:
        """Count and raise what ``method`` raised as an error that names plugin, method and cause.

        Raised unchanged: ``PluginError``, which names a plugin already, and outside a step any
        ``TreadleError``, whose words are meant for the user. In strict mode the failure of a
        request is an ``EngineError``, unless ``error_class`` says what it is.
        """
        if isinstance(error, PluginError) or is_for_process(error):
            raise error
        self.counter(method).record_failure(start_time)
        if isinstance(error, TreadleError) and not in_step:
            raise error
        text = self.entry.failure(method, error)
        if self._is_fatal and error_class is None:
            raise strict_error(text) from error
        plugin_error = (error_class or self.kind.error)(text)
        if isinstance(plugin_error, PluginError):
            plugin_error.plugin = self.entry.id
        raise plugin_error from error

    def handle(
        self,
        method: str,
        rules: MethodRules,
        error: BaseException,
        arguments: tuple[Any, ...],
        start_time: float | None = None,
    ) -> Any:
        """Raise the error of a failed call, or return what kind and ``rules`` give instead."""
        if self.kind.failure == "itself":
            return self.strike(method, error, start_time)
        try:
            self.fail(
                method, error, in_step=rules.in_step, start_time=start_time, error_class=rules.error
            )
        except TreadleError as plugin_error:
            if rules.fallback is None or self._is_fatal:
                raise
            log.warning("%s; a replacement is used", plugin_error)
            return rules.fallback(plugin_error, *arguments)

    def strike(self, method: str, error: BaseException, start_time: float | None = None) -> None:
        """Record a failure that costs only the plugin; in strict mode raise ``EngineError``."""
        if is_for_process(error):
            raise error
        entry = self.entry
        self.counter(method).record_failure(start_time)
        text = entry.failure(method, error)
        if self.is_strict:
            raise strict_error(text) from error
        self.strikes += 1
        log.warning("%s; treadle goes on without it", text, exc_info=error)
        if self.strikes >= MAX_CONSECUTIVE_FAILURES:
            self.retry_time = perf_counter() + RETRY_SECONDS
            entry.reason = f"failed {self.strikes} times in a row: {error}"
            if entry.state != "broken":
                log.error("%s is not called for %g s", entry.id, RETRY_SECONDS)
            entry.state, entry.error = "broken", error

    def recover(self) -> None:
        """Record the success of a plugin that had failed."""
        self.strikes, self.retry_time = 0, 0.0
        self.entry.state, self.entry.reason, self.entry.error = "loaded", "", None
