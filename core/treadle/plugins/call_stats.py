"""How often plugins were called, how that ended, and how long it took."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from treadle.api.plugin_kind import PluginKind
from treadle.errors import ConfigError
from treadle.plugins.kinds import installed_kinds

__all__ = ("CallCounter", "PluginCallStats")

log = logging.getLogger("treadle.plugins")

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

    def failed(self, seconds: float = 0.0) -> None:
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
        kind = plugin.partition(":")[0]
        return self._kinds[kind].budget_of(hook, self._budgets.get(kind))

    def counter(self, plugin: str, hook: str) -> CallCounter:
        """Return the counter of a hook or method."""
        with self._lock:
            if (counter := self._counters.get((plugin, hook))) is None:
                counter = CallCounter(plugin, hook, self.budget(plugin, hook))
                self._counters[plugin, hook] = counter
            return counter

    def rows(self) -> list[tuple[str, str, str, int]]:
        """Return plugin, hook or method, outcome, and the number of such calls."""
        return [
            (counter.plugin, counter.hook, outcome, count)
            for counter in list(self._counters.values())
            for outcome in ("ok", "slow", "error")
            if (count := getattr(counter, outcome))
        ]

    def seconds(self) -> list[tuple[str, str, int, float]]:
        """Return plugin, hook or method, the number of calls, and their total seconds."""
        return [
            (counter.plugin, counter.hook, count, counter.seconds)
            for counter in list(self._counters.values())
            if (count := counter.ok + counter.slow + counter.error)
        ]
