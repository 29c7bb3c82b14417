"""A stat logger that keeps a number, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import SHARED, Mutant, Specimen
from treadle.testing.stats import StatLoggerSuite

SOURCE = """
import time
from treadle.api import impl

TREADLE = {"stat_loggers": ["mine"]}


class Mine:
    def record(self, stats):
        self.last = stats.num_steps


@impl
def treadle_stat_logger(name):
    return Mine() if name == "mine" else None
"""

SPECIMENS = (
    Specimen(
        suite=StatLoggerSuite,
        plugin="stat_loggers:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_two_builds_are_two_objects", SHARED),
            Mutant(
                "test_an_engine_that_has_done_nothing",
                {"= stats.num_steps": "= 1 / stats.num_steps"},
            ),
            Mutant("test_a_run", {"= stats.num_steps": "= 1 / (stats.num_waiting - 2)"}),
            Mutant(
                "test_an_engine_without_pages_or_time",
                {"= stats.num_steps": "= stats.num_steps and stats.num_steps / stats.step_seconds"},
            ),
            Mutant(
                "test_the_statistics_are_left_as_they_are",
                {"= stats.num_steps": "= stats.finished.pop('stop', 0)"},
            ),
            Mutant("test_it_is_quick", {"self.last": "time.sleep(0.002)\n        self.last"}),
        ),
    ),
)
