"""The stages of a start: what is announced, who waits for whom, and what is compiled before ranks meet."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from treadle.api.communicators import Communicator
from treadle.errors import EngineError
from treadle.testing.ranks import run_on_ranks
from treadle_worker_kit import stages as startup
from treadle_worker_kit.stages import StartStages


def test_stages_and_steps_are_announced_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[str] = []
    stages = StartStages(announce=announced.append)
    with stages.stage("weights"):
        stages.alive()
        monkeypatch.setattr(startup, "ALIVE_SECONDS", -1.0)
        stages.alive()
    with stages.stage("graphs"):
        stages.step("8 rows")
    # The first ``alive`` comes too early to be announced.
    assert announced == ["weights", "weights", "graphs", "graphs: 8 rows"]
    assert list(stages.seconds) == ["weights", "graphs"] and min(stages.seconds.values()) >= 0


def test_a_stage_that_fails_is_not_left_together() -> None:
    announced: list[str] = []
    stages = StartStages(announce=announced.append)
    with pytest.raises(ZeroDivisionError), stages.stage("weights"):
        raise ZeroDivisionError
    assert announced == ["weights"] and not stages.seconds


def test_no_rank_begins_a_stage_before_all_have_ended_the_last() -> None:
    """Rank 1 ends each stage last: the others have got to its end before."""
    order: list[tuple[str, int]] = []
    others = {name: threading.Barrier(3, timeout=60) for name in ("first", "second")}

    def run(base: Any) -> None:
        meet = base.all_reduce_min

        def all_reduce_min(values: list[int]) -> list[int]:
            if base.rank != 1:
                others[stage].wait()
            least: list[int] = meet(values)
            return least

        base.all_reduce_min = all_reduce_min
        stages = StartStages(base)
        for stage in ("first", "second"):
            with stages.stage(stage):
                order.append((stage, base.rank))
                if base.rank == 1:
                    others[stage].wait()

    run_on_ranks(3, run)
    assert {stage for stage, _ in order[:3]} == {"first"}


def test_ranks_compile_alone_and_meet_then() -> None:
    import torch

    compiled: set[int] = set()

    def run(base: Any) -> None:
        stages = StartStages(base)
        with stages.stage("graphs"):
            with stages.dry_run() as compiles:
                assert compiles
                for _ in range(base.rank):  # nobody else sums as often
                    base.all_reduce(torch.ones(2))
                compiled.add(base.rank)
            assert compiled == {0, 1, 2}
            assert base.all_reduce(torch.ones(2)).tolist() == [3, 3]

    run_on_ranks(3, run)


@pytest.mark.parametrize("odd", [0, 2, None])
def test_ranks_that_differ_say_so(odd: int | None) -> None:
    def run(base: Communicator) -> str:
        stages = StartStages(base)
        try:
            stages.check_alike("backends", "flashinfer" if base.rank == odd else "sdpa", 16)
        except EngineError as error:
            return str(error)
        return ""

    texts = run_on_ranks(3, run)
    assert [bool(text) for text in texts] == [odd is not None] * 3
    if odd is not None:
        assert "the ranks have different backends" in texts[1]
        assert f"rank {odd} has ('flashinfer', 16)" in texts[odd]
