"""Who is named when a start takes long: the ranks that the others wait for."""

from __future__ import annotations

import logging

import pytest

from treadle.errors import EngineError
from treadle_worker_kit.messages import Progress
from treadle_worker_kit.monitor import WARN_SECONDS, StartMonitor


class Start:
    """Three ranks and a clock that the test sets."""

    def __init__(self, limit: float = 100.0) -> None:
        self.now = 1000.0
        self.monitor = StartMonitor(3, limit, lambda: self.now)

    def reach(self, *stages: str) -> None:
        """Let ranks report their stages; a stage with ``…`` is one at whose end the rank waits."""
        for rank, stage in enumerate(stages):
            if stage:
                self.monitor.update(rank, Progress(stage.rstrip("…"), stage.endswith("…")))

    def error(self, seconds: float) -> str:
        self.now += seconds
        with pytest.raises(EngineError) as caught:
            self.monitor.check()
        return str(caught.value)


def test_whoever_is_in_an_earlier_stage_is_named() -> None:
    start = Start()
    start.reach("imports", "imports", "imports")
    start.reach("weights", "", "weights…")
    assert start.monitor.behind == [1] and start.monitor.stage_of(1) == "imports"
    assert start.error(101).startswith(
        "the start hangs: rank 1 did not finish stage 'imports' in 100 s; the others wait for that"
    )


def test_whoever_waits_is_not_named() -> None:
    start = Start()
    start.reach("weights…", "weights", "weights…")
    assert start.monitor.behind == [1]
    start.reach("", "weights…")
    assert start.monitor.behind == [0, 1, 2], "the store itself hangs"
    assert "ranks 0, 1, 2 did not finish stage 'weights' in 100 s. See" in start.error(101)


def test_ranks_that_meet_on_a_device_are_named_together() -> None:
    start = Start()
    start.reach("graphs", "graphs", "graphs")
    start.monitor.started(2)
    assert "ranks 0, 1 did not finish stage 'graphs' in 100 s" in start.error(101)


def test_the_time_is_that_of_one_stage_and_begins_anew_with_progress() -> None:
    start = Start()
    for stage in ("imports", "weights", "weights", "cache"):
        start.reach(stage, stage, stage)
        start.now += 99
        start.monitor.check()
    start.reach("", "cache…", "cache…")
    start.now += 1
    start.monitor.check()
    assert "rank 0 did not finish stage 'cache'" in start.error(1)


def test_a_rank_that_never_reports_is_named() -> None:
    start = Start()
    start.reach("", "imports", "imports")
    assert "rank 0 did not finish stage 'process'" in start.error(101)


def test_those_that_have_started_are_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    start = Start()
    for rank in range(3):
        start.monitor.started(rank)
    start.now += 1e6
    start.monitor.check()
    assert start.monitor.behind == [] and not caplog.records


def test_a_long_wait_is_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    start = Start(1e6)
    start.reach("weights…", "weights", "weights…")
    with caplog.at_level(logging.WARNING, "treadle.workers"):
        for _ in range(int(WARN_SECONDS * 9)):
            start.now += 1
            start.monitor.check()
        start.reach("cache", "cache…", "cache…")
        start.now += WARN_SECONDS + 1
        start.monitor.check()
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        *(
            f"waiting for rank 1 in stage 'weights' of the start ({n * WARN_SECONDS + 1:.0f} s)"
            for n in (1, 2, 4, 8)
        ),
        f"waiting for rank 0 in stage 'cache' of the start ({WARN_SECONDS + 1:.0f} s)",
    ]
