"""The core's scheduling policies: first come first served, and priority."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.api import impl
from treadle.api.engine import QueuedRequest, SchedulingPolicy

__all__ = ("FirstCome", "Priority", "treadle_scheduling_policy")


class FirstCome:
    """Policy ``fcfs``: admit in order of arrival, preempt the sequence that arrived last."""

    def sort_key(self, request: QueuedRequest) -> tuple[float, ...]:
        return (request.arrival_time,)

    def select_victim(self, running: Sequence[QueuedRequest]) -> int:
        return max(range(len(running)), key=lambda i: self.sort_key(running[i]))


class Priority(FirstCome):
    """Policy ``priority``: admit the lowest ``priority`` first, then by arrival."""

    def sort_key(self, request: QueuedRequest) -> tuple[float, ...]:
        return (request.priority, request.arrival_time)


@impl
def treadle_scheduling_policy(name: str) -> SchedulingPolicy | None:
    policies = {"fcfs": FirstCome, "priority": Priority}
    return policies[name]() if name in policies else None
