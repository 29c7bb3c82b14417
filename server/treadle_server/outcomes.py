"""The health of a server from what came of its requests and of the calls of plugins."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping

from treadle.processes.watchdog import WatchdogExecutor

__all__ = ("MAX_FAILURES", "NUM_REQUESTS", "CallOutcomes", "RequestOutcomes", "hanging")

MAX_FAILURES = 3
"""Failures of one method of a plugin, without a success between them, from which it counts as broken."""
NUM_REQUESTS = 16
"""So many requests in a row have failed when the server is no longer sent any."""
MEMORY_SECONDS = 60.0
"""A failure is forgotten after this time: who sends no requests could not see a recovery."""


def hanging(threads: Mapping[str, WatchdogExecutor]) -> dict[str, str]:
    """Return the plugins whose calls are refused because so many do not return, with the reason."""
    return {
        name: f"{executor.num_stuck} of its calls do not return; it is tried once in a minute"
        for key, executor in threads.items()
        if executor.is_broken
        for name in key.split()
    }


class RequestOutcomes:
    """Whether the last requests have failed. Those that a client ended or got wrong do not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=NUM_REQUESTS)

    def add(self, *, failed: bool) -> None:
        if failed:
            self._failures.append(self._clock())
        else:
            self._failures.clear()

    @property
    def all_failed(self) -> bool:
        """Whether so many of the last requests failed, and nothing but failures has come since."""
        is_full = len(self._failures) == NUM_REQUESTS
        return is_full and self._clock() - self._failures[-1] < MEMORY_SECONDS


class CallOutcomes:
    """Which plugins fail, from the numbers of their calls."""

    def __init__(self) -> None:
        self._good: dict[tuple[str, str, str], int] = {}
        self._bad: dict[tuple[str, str, str], int] = {}

    def broken(
        self,
        rows: Mapping[str, Iterable[tuple[str, str, str, int]]],
        threads: Mapping[str, WatchdogExecutor],
    ) -> list[str]:
        """Return the plugins of which a method has failed again and again, or no longer returns.

        ``rows`` are those of ``PluginCallStats``, by process; they only grow.
        """
        good: dict[tuple[str, str, str], int] = defaultdict(int)
        bad: dict[tuple[str, str, str], int] = defaultdict(int)
        for process, process_rows in rows.items():
            for plugin, method, outcome, count in process_rows:
                (bad if outcome == "error" else good)[process, plugin, method] += count
        names = set(hanging(threads))
        for call, count in bad.items():
            if good[call] != self._good.get(call, 0) or call not in self._bad:
                self._good[call] = good[call]
                # Failures since the last look may lie before a success: only later ones count.
                self._bad[call] = count if good[call] else 0
            if count - self._bad[call] >= MAX_FAILURES:
                names.add(call[1])
        return sorted(names)
