"""The two policies that ship with the core: first come first served, and priority."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.api import impl
from treadle.api.engine import QueuedRequest, SchedulingPolicy

__all__ = ("FirstCome", "Priority", "treadle_policy")


class FirstCome:
    """Admit in order of arrival; preempt whoever came last."""

    def order(self, request: QueuedRequest) -> tuple[float, ...]:
        return (request.arrival,)

    def victim(self, running: Sequence[QueuedRequest]) -> int:
        return max(range(len(running)), key=lambda i: self.order(running[i]))


class Priority(FirstCome):
    """Admit the lowest ``priority`` first, then by arrival; preempt the highest."""

    def order(self, request: QueuedRequest) -> tuple[float, ...]:
        return (request.priority, request.arrival)


@impl
def treadle_policy(name: str) -> SchedulingPolicy | None:
    policies = {"fcfs": FirstCome, "priority": Priority}
    return policies[name]() if name in policies else None
