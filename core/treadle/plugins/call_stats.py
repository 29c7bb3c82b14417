"""What calls of plugins came to and took, and the breakers that stop calling one that keeps
failing.

Which failure costs what is decided by kind: a stat logger or an extension only itself, a logits
processor its request, a policy the request it cannot order, everything that computes the step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from math import isfinite
from time import perf_counter
from typing import Any

from treadle.api.engine import QueuedRequest, SchedulingPolicy
from treadle.errors import ConfigError, EngineError
from treadle.plugins.entries import Entry
from treadle.plugins.kinds import KINDS

__all__ = ("MOST_FAILURES", "PASSED", "Breaker", "Calls", "GuardedPolicy", "Tally", "budgets")

log = logging.getLogger("treadle.plugins")

MOST_FAILURES = 3
"""Failures in a row after which a plugin is not called any more."""

PASSED = (KeyboardInterrupt, SystemExit)
"""What is meant for the process, even if a plugin is running when it is raised. All else is the
plugin's: a panic of a Rust library too, which is no ``Exception``."""

HOOK_SECONDS = 10.0
"""What a hook, which may read files and import, may take at least."""

LOADING_SECONDS = 600.0
"""What a kind's method that loads a model may take at least: checkpoints are fetched, kernels compiled."""

WARN_AGAIN = 60.0
"""Seconds between two lines of the log about one slow plugin."""


def budgets(changed: Mapping[str, float] | None = None) -> dict[str, float]:
    """The seconds that a call may take, by kind. Raises ``ConfigError`` for an unknown kind."""
    changed = changed or {}
    for kind in changed:
        if kind not in KINDS:
            raise ConfigError(
                f"plugin_time_budget names {kind!r}, which is no kind of plugin; known: "
                f"{', '.join(KINDS)}"
            )
    return {name: changed.get(name, kind.budget) for name, kind in KINDS.items()}


class Calls:
    """Of one hook or method of one plugin. Not safe in threads by itself."""

    __slots__ = ("_warn_at", "budget", "error", "hook", "ok", "plugin", "seconds", "slow")

    def __init__(self, plugin: str, hook: str, budget: float) -> None:
        self.plugin, self.hook, self.budget = plugin, hook, budget
        self.ok = self.slow = self.error = 0
        self.seconds = 0.0
        self._warn_at = 0.0

    def done(self, taken: float) -> None:
        """Count a call that returned after ``taken`` seconds."""
        self.seconds += taken
        if taken <= self.budget:
            self.ok += 1
        else:
            self.slow += 1
            self._warn(taken)

    def failed(self, taken: float) -> None:
        """Count a call that raised, or that nobody waits for any more."""
        self.seconds += taken
        self.error += 1

    def _warn(self, taken: float) -> None:
        now = perf_counter()
        if now < self._warn_at:
            return
        self._warn_at = now + WARN_AGAIN
        log.warning(
            "%s is slow: %s took %.3g s, its budget is %g s (--plugin-time-budget)",
            self.plugin,
            self.hook,
            taken,
            self.budget,
        )


class Tally:
    """Calls by plugin (``kind:key``), hook or method, and outcome, and the time that they took.

    A call that takes longer than the budget of its kind is ``slow``, or ``error`` if it raises, else
    ``ok``. Counts only grow. Safe in threads.
    """

    def __init__(self, budget: Mapping[str, float] | None = None) -> None:
        self._budget = budgets() if budget is None else budget
        self._calls: dict[tuple[str, str], Calls] = {}
        self._lock = threading.Lock()

    def budget(self, plugin: str, hook: str) -> float:
        """Seconds."""
        kind = plugin.partition(":")[0]
        most = self._budget.get(kind, HOOK_SECONDS)
        if kind in KINDS and hook == KINDS[kind].loads:
            return max(most, LOADING_SECONDS)
        return max(most, HOOK_SECONDS) if hook.startswith("treadle_") else most

    def done(self, plugin: str, hook: str, began: float) -> None:
        """Count a call that returned. ``began`` is what ``perf_counter`` said before it."""
        taken = perf_counter() - began
        with self._lock:
            self._of(plugin, hook).done(taken)

    def failed(self, plugin: str, hook: str, began: float) -> None:
        """Count a call that raised, or that nobody waits for any more."""
        taken = perf_counter() - began
        with self._lock:
            self._of(plugin, hook).failed(taken)

    def calls(self, plugin: str, hook: str) -> Calls:
        """The counter itself, for a hook that is called by one thread and too often for a lock."""
        with self._lock:
            return self._of(plugin, hook)

    def rows(self) -> list[tuple[str, str, str, int]]:
        """Plugin, hook or method, outcome, and how often it was that."""
        with self._lock:
            return [
                (plugin, hook, outcome, count)
                for (plugin, hook), calls in self._calls.items()
                for outcome in ("ok", "slow", "error")
                if (count := getattr(calls, outcome))
            ]

    def seconds(self) -> list[tuple[str, str, int, float]]:
        """Plugin, hook or method, how often it was called, and what that took together."""
        with self._lock:
            return [
                (plugin, hook, count, calls.seconds)
                for (plugin, hook), calls in self._calls.items()
                if (count := calls.ok + calls.slow + calls.error)
            ]

    def _of(self, plugin: str, hook: str) -> Calls:
        calls = self._calls.get((plugin, hook))
        if calls is None:
            calls = Calls(plugin, hook, self.budget(plugin, hook))
            self._calls[plugin, hook] = calls
        return calls


class Breaker:
    """Calls a plugin whose failures cost nobody else anything.

    In strict mode a failure is an ``EngineError``. Otherwise it is logged, and after
    ``MOST_FAILURES`` in a row the entry is broken and not called again.
    """

    def __init__(self, entry: Entry, tally: Tally, *, strict: bool = False) -> None:
        self.entry, self._tally, self._strict = entry, tally, strict
        self._failures = 0

    @property
    def open(self) -> bool:
        return self._failures >= MOST_FAILURES

    def call(self, target: object, method: str, *arguments: Any) -> None:
        """``target.method(…)``, whose result nobody wants."""
        if self.open:
            return
        began = perf_counter()
        try:
            getattr(target, method)(*arguments)
        except PASSED:
            raise
        except BaseException as error:  # a plugin may raise anything
            self.failed(method, error, began)
        else:
            self._failures = 0
            self._tally.done(self.entry.id, method, began)

    def failed(self, method: str, error: BaseException, began: float) -> None:
        """Take note of a failure of a call that began when ``perf_counter`` said ``began``."""
        entry = self.entry
        self._tally.failed(entry.id, method, began)
        text = entry.failure(method, error)
        if self._strict:
            raise EngineError(f"{text} (plugin_strict makes it fatal)") from error
        self._failures += 1
        log.warning("%s; treadle goes on without it", text, exc_info=error)
        if self.open:
            entry.error = error
            entry.close("broken", f"failed {MOST_FAILURES} times in a row, lately: {error}")
            entry.state = "broken"
            log.error("%s is not called any more", entry.id)


class GuardedPolicy:
    """A policy that cannot harm the scheduler.

    ``order`` raises ``EngineError`` with the root cause, which is the request's own failure; a
    ``victim`` that raises or is none of those that run is replaced by the latest arrival.
    """

    def __init__(
        self, policy: SchedulingPolicy, entry: Entry, tally: Tally, *, strict: bool = False
    ) -> None:
        self._policy, self._entry, self._tally = policy, entry, tally
        self._strict = strict
        self._length = 0

    def order(self, request: QueuedRequest) -> tuple[float, ...]:
        began = perf_counter()
        try:
            order = tuple(float(value) for value in self._policy.order(request))
            if not order or not all(map(isfinite, order)):
                raise ValueError(f"{order!r} is no order; a tuple of finite numbers is")
            if len(order) != (self._length or len(order)):
                raise ValueError(f"{order!r} has not {self._length} numbers as before")
        except PASSED:
            raise
        except BaseException as error:
            self._tally.failed(self._entry.id, "order", began)
            raise EngineError(self._entry.failure("order", error)) from error
        self._length = len(order)
        self._tally.done(self._entry.id, "order", began)
        return order

    def victim(self, running: Sequence[QueuedRequest]) -> int:
        began = perf_counter()
        try:
            index = int(
                self._policy.victim(tuple(running))
            )  # the scheduler's own list is not theirs
            if not 0 <= index < len(running):
                raise IndexError(f"victim {index} is none of {len(running)} requests")
        except PASSED:
            raise
        except BaseException as error:
            self._tally.failed(self._entry.id, "victim", began)
            text = self._entry.failure("victim", error)
            if self._strict:
                raise EngineError(f"{text} (plugin_strict makes it fatal)") from error
            log.warning("%s; the latest arrival makes room", text)
            return max(range(len(running)), key=lambda i: running[i].arrival)
        self._tally.done(self._entry.id, "victim", began)
        return index
