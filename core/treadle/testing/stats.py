"""The conformance suite of stat loggers.

::

    class TestMine(PluginSuite, StatLoggerSuite):
        plugin = "stat_loggers:mine"
"""

from __future__ import annotations

import time

from treadle.api.engine import StatLogger
from treadle.api.kinds import STAT_LOGGERS
from treadle.api.stats import EngineStats
from treadle.testing.plugin import PluginTest

__all__ = ("StatLoggerSuite",)

STEPS = 500
BUDGET = 1e-3
"""Seconds that one ``record`` may take on average: it stands between two steps."""


class StatLoggerSuite(PluginTest):
    """Checks that a logger is fast and never raises, because it is called after every step."""

    def build(self) -> StatLogger:
        (logger,) = [self.plugin_manager().create(STAT_LOGGERS, self.key)]
        return logger

    def stats(self, step: int) -> EngineStats:
        return EngineStats(
            num_steps=step,
            num_running=step % 7,
            num_waiting=step % 3,
            num_pages=100,
            num_used_pages=step % 100,
            prompt_tokens=step * 20,
            generation_tokens=step * 5,
            finished={"stop": step // 3, "length": step // 5},
            step_seconds=step * 0.02,
        )

    def test_two_builds_are_two_objects(self) -> None:
        assert self.build() is not self.build()

    def test_an_engine_that_has_done_nothing(self) -> None:
        self.build().record(EngineStats())

    def test_a_run(self) -> None:
        logger = self.build()
        for step in range(1, 50):
            logger.record(self.stats(step))

    def test_an_engine_without_pages_or_time(self) -> None:
        """Divisors of a rate may be zero."""
        logger = self.build()
        for _ in range(2):
            logger.record(EngineStats(num_steps=1, generation_tokens=3))

    def test_the_statistics_are_left_as_they_are(self) -> None:
        """All loggers receive the same object, so a logger must not change it."""
        stats = self.stats(21)
        self.build().record(stats)
        assert stats == self.stats(21)

    def test_it_is_quick(self) -> None:
        logger = self.build()
        start_time = time.perf_counter()
        for _ in range(STEPS):
            logger.record(self.stats(21))
        mean_seconds = (time.perf_counter() - start_time) / STEPS
        assert mean_seconds < BUDGET, (
            f"record takes {mean_seconds * 1e3:.2f} ms; the next step waits for it"
        )
