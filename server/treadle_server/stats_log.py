"""A line of the log every ten seconds while the engine works: what it does and how full it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from treadle.api.stats import EngineStats

__all__ = ("StatsLog",)

log = logging.getLogger("treadle.stats")

INTERVAL_SECONDS = 10.0


class StatsLog:
    """Logs the difference between the engine's stats now and at the last line.

    While nothing runs and nothing has run since the last line, there is none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._last: EngineStats | None = None

    def update(self, stats: EngineStats) -> None:
        """Log if it is time. Called about once a second."""
        now = self._clock()
        last, seconds = self._last, now - self._since
        if last is not None and seconds < INTERVAL_SECONDS:
            return
        self._last, self._since = stats, now
        if last is None:
            return
        output = stats.generation_tokens - last.generation_tokens
        # What steps have computed beside it: a long prompt takes many, and cached tokens none.
        tokens = max(stats.step_tokens - last.step_tokens - output, 0), output
        if not (any(tokens) or stats.num_running or stats.num_waiting):
            return
        queries = stats.prefix_cache_queries - last.prefix_cache_queries
        hits = stats.prefix_cache_hits - last.prefix_cache_hits
        log.info(
            "prompt %.1f tok/s, output %.1f tok/s, running %d, waiting %d, KV cache %.1f %%, "
            "prefix cache hits %s",
            tokens[0] / seconds,
            tokens[1] / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.num_used_pages / stats.num_pages if stats.num_pages else 0.0,
            f"{100 * hits / queries:.1f} %" if queries else "–",
        )
