"""What calls of plugins came to, and the breakers that stop calling one that keeps failing.

Which failure costs what is decided by kind: a stat logger or an extension only itself, a logits
processor its request, a policy the request it cannot order, everything that computes the step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Literal

from weft.api.engine import QueuedRequest, SchedulingPolicy
from weft.errors import EngineError
from weft.plugins.entries import Entry

__all__ = ("MOST_FAILURES", "Breaker", "GuardedPolicy", "Tally")

log = logging.getLogger("weft.plugins")

MOST_FAILURES = 3
"""Failures in a row after which a plugin is not called any more."""

Outcome = Literal["ok", "error"]


class Tally:
    """Calls by plugin (``kind:key``), hook or method, and outcome. Counts only grow."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()

    def count(self, plugin: str, hook: str, outcome: Outcome) -> None:
        self._calls[plugin, hook, outcome] += 1

    def rows(self) -> list[tuple[str, str, str, int]]:
        return [(*name, count) for name, count in list(self._calls.items())]


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
        try:
            function(*arguments)
        except Exception as error:  # a plugin may raise anything
            self.failed(method, error)
        else:
            self._failures = 0
            self._tally.count(self._entry.id, method, "ok")

    def failed(self, method: str, error: Exception) -> None:
        """Take note of a failure."""
        entry = self._entry
        self._tally.count(entry.id, method, "error")
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
        try:
            order = tuple(float(value) for value in self._policy.order(request))
            if not order or not all(map(isfinite, order)):
                raise ValueError(f"{order!r} is no order; a tuple of finite numbers is")
            if len(order) != (self._length or len(order)):
                raise ValueError(f"{order!r} has not {self._length} numbers as before")
        except Exception as error:
            self._tally.count(self._entry.id, "order", "error")
            raise EngineError(self._text("order", error)) from error
        self._length = len(order)
        self._tally.count(self._entry.id, "order", "ok")
        return order

    def victim(self, running: Sequence[QueuedRequest]) -> int:
        try:
            index = int(self._policy.victim(running))
            if not 0 <= index < len(running):
                raise IndexError(f"victim {index} is none of {len(running)} requests")
        except Exception as error:
            self._tally.count(self._entry.id, "victim", "error")
            if self._strict:
                raise EngineError(self._text("victim", error)) from error
            log.warning("%s; the latest arrival makes room", self._text("victim", error))
            return max(range(len(running)), key=lambda i: running[i].arrival)
        self._tally.count(self._entry.id, "victim", "ok")
        return index

    def _text(self, method: str, error: Exception) -> str:
        entry = self._entry
        return f"{entry.id} from {entry.owner} failed in {method}: {type(error).__name__}: {error}"
