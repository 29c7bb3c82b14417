"""Whose turn it is, by a clock that only the test moves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from treadle.processes import fair_queue
from treadle.processes.fair_queue import FairQueue


@dataclass(frozen=True)
class Job:
    name: str
    cost: float
    client: str = ""


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fair_queue, "monotonic", clock)
    return clock


def filled(*jobs: Job, rate: float = 10.0) -> FairQueue[Job]:
    queue: FairQueue[Job] = FairQueue(rate)
    for job in jobs:
        queue.push(job)
    return queue


def order(queue: FairQueue[Job]) -> str:
    names = []
    while (job := queue.pop()) is not None:
        names.append(job.name)
    return "".join(names)


def test_the_cheapest_of_a_client_is_next(clock: Clock) -> None:
    assert order(filled(Job("c", 30), Job("a", 1), Job("b", 2), Job("d", 90))) == "abcd"


def test_clients_take_turns(clock: Clock) -> None:
    jobs = [
        Job("a", 5, "a"),
        Job("b", 5, "a"),
        Job("c", 5, "a"),
        Job("x", 6, "x"),
        Job("y", 6, "x"),
    ]
    assert order(filled(*jobs)) == "axbyc"


def test_what_a_client_cost_more_than_expected_counts(clock: Clock) -> None:
    queue = filled(Job("a", 1, "a"), Job("b", 1, "a"), Job("x", 50, "x"))
    assert queue.pop() == Job("a", 1, "a")
    queue.charge("a", 100)
    assert order(queue) == "xb"


def test_what_a_client_has_had_is_forgotten(clock: Clock) -> None:
    queue = filled(Job("b", 1, "a"), Job("x", 50, "x"))
    queue.charge("a", 100)
    clock.now += 9.0
    assert order(queue) == "bx"


def test_a_job_is_not_overtaken_for_ever(clock: Clock) -> None:
    queue = filled(Job("old", 50, "a"))
    clock.now += 4.0
    queue.push(Job("new", 1, "b"))
    assert queue.pop() == Job("new", 1, "b")
    clock.now += 1.1
    queue.push(Job("newer", 1, "c"))
    assert queue.pop() == Job("old", 50, "a")


def test_it_can_be_asked_for_a_cheap_job_only(clock: Clock) -> None:
    queue = filled(Job("a", 5), Job("b", 9))
    assert queue.pop(4) is None and len(queue) == 2
    assert queue.pop(5) == Job("a", 5)


def test_a_job_may_leave_once(clock: Clock) -> None:
    queue = filled(Job("a", 5), Job("b", 9))
    assert queue.discard(Job("a", 5)) and not queue.discard(Job("a", 5))
    assert list(queue) == [Job("b", 9)] and order(queue) == "b"
