"""How often plugins were called, how long that took, and circuit breakers.

The kind decides what fails with a plugin: stat loggers and extensions are disabled; a logits
processor or policy fails its request; anything that computes fails the whole step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from treadle.api.plugin_kind import PluginKind
from treadle.errors import ConfigError, EngineError
from treadle.plugins.entries import Entry
from treadle.plugins.kinds import installed_kinds

__all__ = (
    "MAX_CONSECUTIVE_FAILURES",
    "NOT_CAUGHT",
    "CallCounter",
    "CircuitBreaker",
    "PluginCallStats",
)

log = logging.getLogger("treadle.plugins")

MAX_CONSECUTIVE_FAILURES = 3
"""Consecutive failures after which a plugin is not called any more."""

NOT_CAUGHT = (KeyboardInterrupt, SystemExit)
"""Meant for the process, even if a plugin is running. Everything else is the plugin's, including
the panic of a Rust library, which is not an ``Exception``."""

HOOK_SECONDS = 10.0
"""The smallest time budget of a hook, which may read files and import."""

LOADING_SECONDS = 600.0
"""The smallest time budget of a method that downloads or loads a model."""

SECONDS_BETWEEN_WARNINGS = 60.0


class CallCounter:
    """Calls of one hook or method of one plugin. Safe in threads."""

    __slots__ = ("_lock", "_warn_at", "budget", "error", "hook", "ok", "plugin", "seconds", "slow")

    def __init__(self, plugin: str, hook: str, budget: float) -> None:
        self.plugin, self.hook, self.budget = plugin, hook, budget
        self.ok = self.slow = self.error = 0
        self.seconds = 0.0
        self._warn_at = 0.0
        self._lock = threading.Lock()

    def done(self, seconds: float) -> None:
        """Count a call that returned after ``seconds``; log one that exceeded the budget."""
        with self._lock:
            self.seconds += seconds
            if seconds <= self.budget:
                self.ok += 1
                return
            self.slow += 1
            now = perf_counter()
            if now < self._warn_at:
                return
            self._warn_at = now + SECONDS_BETWEEN_WARNINGS
        log.warning(
            "%s is slow: %s took %.3g s, its budget is %g s (--plugin-time-budget)",
            self.plugin,
            self.hook,
            seconds,
            self.budget,
        )

    def failed(self, seconds: float) -> None:
        """Count a call that raised, or that timed out."""
        with self._lock:
            self.seconds += seconds
            self.error += 1


class PluginCallStats:
    """Calls by plugin (``kind:key``), hook or method, and outcome, and their total time.

    A call that exceeds the time budget of its kind is ``slow``, one that raises is ``error``, every
    other is ``ok``. ``budgets`` replaces the budgets of some kinds, in seconds. Counts only grow.
    Safe in threads. Raises ``ConfigError`` for the budget of an unknown kind.
    """

    def __init__(
        self,
        budgets: Mapping[str, float] | None = None,
        kinds: Mapping[str, PluginKind[Any]] | None = None,
    ) -> None:
        self._kinds = installed_kinds() if kinds is None else kinds
        self._budgets = budgets or {}
        for kind in self._budgets:
            if kind not in self._kinds:
                raise ConfigError(
                    f"plugin_time_budget names {kind!r}, which is no kind of plugin; known: "
                    f"{', '.join(self._kinds)}"
                )
        self._counters: dict[tuple[str, str], CallCounter] = {}
        self._lock = threading.Lock()

    def budget(self, plugin: str, hook: str) -> float:
        """Return the time budget of a hook or method, in seconds."""
        name = plugin.partition(":")[0]
        kind = self._kinds.get(name)
        seconds = self._budgets.get(name, kind.budget if kind else HOOK_SECONDS)
        if kind is not None and hook == kind.loads:
            return max(seconds, LOADING_SECONDS)
        return max(seconds, HOOK_SECONDS) if hook.startswith("treadle_") else seconds

    def counter(self, plugin: str, hook: str) -> CallCounter:
        """Return the counter of a hook or method."""
        with self._lock:
            if (counter := self._counters.get((plugin, hook))) is None:
                counter = CallCounter(plugin, hook, self.budget(plugin, hook))
                self._counters[plugin, hook] = counter
            return counter

    def done(self, plugin: str, hook: str, began: float) -> None:
        """Count a call that returned and began at ``began`` of ``perf_counter``."""
        self.counter(plugin, hook).done(perf_counter() - began)

    def failed(self, plugin: str, hook: str, began: float) -> None:
        """Count a call that raised, or that timed out."""
        self.counter(plugin, hook).failed(perf_counter() - began)

    def rows(self) -> list[tuple[str, str, str, int]]:
        """Return plugin, hook or method, outcome, and the number of such calls."""
        return [
            (counter.plugin, counter.hook, outcome, count)
            for counter in self._snapshot()
            for outcome in ("ok", "slow", "error")
            if (count := getattr(counter, outcome))
        ]

    def seconds(self) -> list[tuple[str, str, int, float]]:
        """Return plugin, hook or method, the number of calls, and their total seconds."""
        return [
            (counter.plugin, counter.hook, count, counter.seconds)
            for counter in self._snapshot()
            if (count := counter.ok + counter.slow + counter.error)
        ]

    def _snapshot(self) -> list[CallCounter]:
        with self._lock:
            return list(self._counters.values())


class CircuitBreaker:
    """Stops calling a plugin after repeated failures, which cost nothing but the plugin.

    With ``strict`` a failure is an ``EngineError``. Otherwise it is logged, and after
    ``MAX_CONSECUTIVE_FAILURES`` the entry is broken and not called again.
    """

    def __init__(self, entry: Entry, stats: PluginCallStats, *, strict: bool = False) -> None:
        self.entry, self._stats, self._strict = entry, stats, strict
        self._failures = 0

    @property
    def is_open(self) -> bool:
        """Whether the plugin is not called any more."""
        return self._failures >= MAX_CONSECUTIVE_FAILURES

    def succeeded(self) -> None:
        """Record a call that returned."""
        self._failures = 0

    def failed(self, method: str, error: BaseException, began: float) -> None:
        """Record a failure of a call that began at ``began`` of ``perf_counter``."""
        entry = self.entry
        self._stats.failed(entry.id, method, began)
        text = entry.failure(method, error)
        if self._strict:
            raise EngineError(f"{text} (plugin_strict makes it fatal)") from error
        self._failures += 1
        log.warning("%s; treadle goes on without it", text, exc_info=error)
        if self.is_open:
            entry.error = error
            entry.close("broken", f"failed {MAX_CONSECUTIVE_FAILURES} times in a row: {error}")
            entry.state = "broken"
            log.error("%s is not called any more", entry.id)
