"""How often plugins were called, how that ended, and how long it took."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from treadle.api.plugin_kind import PluginKind

__all__ = ("CallCounter", "PluginCallStats")

log = logging.getLogger("treadle.plugins")

SECONDS_BETWEEN_WARNINGS = 60.0


class CallCounter:
    """Calls of one hook or method of one plugin. Safe in threads."""

    def __init__(self, plugin: str, hook: str, budget: float) -> None:
        self.plugin, self.hook, self.budget = plugin, hook, budget
        self.ok = self.slow = self.error = 0
        self.seconds = 0.0
        self._next_warning_time = 0.0
        self._lock = threading.Lock()

    def record_success(self, seconds: float) -> None:
        """Count a call that returned after ``seconds``; log one that exceeded the budget."""
        with self._lock:
            self.seconds += seconds
            if seconds <= self.budget:
                self.ok += 1
                return
            self.slow += 1
            now = perf_counter()
            if now < self._next_warning_time:
                return
            self._next_warning_time = now + SECONDS_BETWEEN_WARNINGS
        log.warning(
            "%s is slow: %s took %.3g s, its budget is %g s (--plugin-time-budget)",
            self.plugin,
            self.hook,
            seconds,
            self.budget,
        )

    def record_failure(self, start_time: float | None = None) -> None:
        """Count a call that raised, or that timed out; it began at ``start_time``, if that is known."""
        with self._lock:
            self.seconds += 0.0 if start_time is None else perf_counter() - start_time
            self.error += 1


class PluginCallStats:
    """Calls by plugin (``kind:key``), hook or method, and outcome, and their total time.

    A call that exceeds the time budget of its kind is ``slow``, one that raises is ``error``, every other is ``ok``.
    ``budgets`` replaces the budgets of some kinds, in seconds. Counts only grow. Safe in threads.
    """

    def __init__(self, budgets: Mapping[str, float] | None = None) -> None:
        self._budgets = budgets or {}
        self._counters: dict[tuple[str, str], CallCounter] = {}
        self._lock = threading.Lock()

    def budget(self, kind: PluginKind[Any], hook: str) -> float:
        """Return the time budget of a hook or method, in seconds."""
        return kind.budget_of(hook, self._budgets.get(kind.name))

    def counter(self, kind: PluginKind[Any], plugin: str, hook: str) -> CallCounter:
        """Return the counter of a hook or method."""
        with self._lock:
            if (counter := self._counters.get((plugin, hook))) is None:
                counter = CallCounter(plugin, hook, self.budget(kind, hook))
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
