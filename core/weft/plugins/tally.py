"""What calls of plugins came to and took, and the breakers that stop calling one that keeps
failing.

Which failure costs what is decided by kind: a stat logger or an extension only itself, a logits
processor its request, a policy the request it cannot order, everything that computes the step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from time import perf_counter
from typing import Any

from weft.api.engine import QueuedRequest, SchedulingPolicy
from weft.errors import ConfigError, EngineError
from weft.plugins.entries import Entry
from weft.plugins.kinds import KINDS

__all__ = ("MOST_FAILURES", "Breaker", "GuardedPolicy", "Tally", "budgets")

log = logging.getLogger("weft.plugins")

MOST_FAILURES = 3
"""Failures in a row after which a plugin is not called any more."""

HOOK_SECONDS = 10.0
"""What a hook, which may read files and import, may take at least."""

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
    """Of one hook or method of one plugin."""

    __slots__ = ("budget", "error", "ok", "seconds", "slow", "warn_at")

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.ok = self.slow = self.error = 0
        self.seconds = 0.0
        self.warn_at = 0.0


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
        most = self._budget.get(plugin.partition(":")[0], HOOK_SECONDS)
        return max(most, HOOK_SECONDS) if hook.startswith("weft_") else most

    def done(self, plugin: str, hook: str, began: float) -> None:
        """Count a call that returned. ``began`` is what ``perf_counter`` said before it."""
        now = perf_counter()
        taken = now - began
        with self._lock:
            calls = self._of(plugin, hook)
            calls.seconds += taken
            if taken <= calls.budget:
                calls.ok += 1
                return
            calls.slow += 1
            if now < calls.warn_at:
                return
            calls.warn_at = now + WARN_AGAIN
        log.warning(
            "%s is slow: %s took %.3g s, its budget is %g s (--plugin-time-budget)",
            plugin,
            hook,
            taken,
            calls.budget,
        )

    def failed(self, plugin: str, hook: str, began: float) -> None:
        """Count a call that raised, or that nobody waits for any more."""
        taken = perf_counter() - began
        with self._lock:
            calls = self._of(plugin, hook)
            calls.seconds += taken
            calls.error += 1

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
                (plugin, hook, calls.ok + calls.slow + calls.error, calls.seconds)
                for (plugin, hook), calls in self._calls.items()
            ]

    def _of(self, plugin: str, hook: str) -> Calls:
        calls = self._calls.get((plugin, hook))
        if calls is None:
            calls = self._calls[plugin, hook] = Calls(self.budget(plugin, hook))
        return calls


class Breaker:
    """Calls a plugin whose failures cost nobody else anything.

    In strict mode a failure is an ``EngineError``. Otherwise it is logged, and after
    ``MOST_FAILURES`` in a row the entry is broken and not called again.
    """

    def __init__(self, entry: Entry, tally: Tally, *, strict: bool = False) -> None:
        self._entry, self._tally, self._strict = entry, tally, strict
        self._failures = 0

    @property
    def open(self) -> bool:
        return self._failures >= MOST_FAILURES

    def call(self, method: str, function: Callable[..., Any], *arguments: Any) -> None:
        if self.open:
            return
        began = perf_counter()
        try:
            function(*arguments)
        except Exception as error:  # a plugin may raise anything
            self.failed(method, error, began)
        else:
            self._failures = 0
            self._tally.done(self._entry.id, method, began)

    def failed(self, method: str, error: Exception, began: float) -> None:
        """Take note of a failure of a call that began when ``perf_counter`` said ``began``."""
        entry = self._entry
        self._tally.failed(entry.id, method, began)
        text = f"{entry.id} from {entry.owner} failed in {method}: {type(error).__name__}: {error}"
        if self._strict:
            raise EngineError(f"{text} (plugin_strict makes it fatal)") from error
        self._failures += 1
        log.warning("%s; weft goes on without it", text, exc_info=error)
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
        except Exception as error:
            self._tally.failed(self._entry.id, "order", began)
            raise EngineError(self._text("order", error)) from error
        self._length = len(order)
        self._tally.done(self._entry.id, "order", began)
        return order

    def victim(self, running: Sequence[QueuedRequest]) -> int:
        began = perf_counter()
        try:
            index = int(self._policy.victim(running))
            if not 0 <= index < len(running):
                raise IndexError(f"victim {index} is none of {len(running)} requests")
        except Exception as error:
            self._tally.failed(self._entry.id, "victim", began)
            if self._strict:
                raise EngineError(self._text("victim", error)) from error
            log.warning("%s; the latest arrival makes room", self._text("victim", error))
            return max(range(len(running)), key=lambda i: running[i].arrival)
        self._tally.done(self._entry.id, "victim", began)
        return index

    def _text(self, method: str, error: Exception) -> str:
        entry = self._entry
        return f"{entry.id} from {entry.owner} failed in {method}: {type(error).__name__}: {error}"
