"""An extension that wraps a hook of other plugins: it counts whom a scheduling policy preempts."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from treadle.api import impl
from treadle.api.types import QueuedRequest, SchedulingPolicy

__all__ = ("Counted", "Preemptions")


class Counted:
    """Any policy, with a count of its victims by priority."""

    def __init__(self, policy: SchedulingPolicy, counts: dict[int, int]) -> None:
        self._policy, self._counts = policy, counts

    def sort_key(self, request: QueuedRequest) -> tuple[float, ...]:
        return self._policy.sort_key(request)

    def select_victim(self, running: Sequence[QueuedRequest]) -> int:
        index = self._policy.select_victim(running)
        priority = running[index].priority
        self._counts[priority] = self._counts.get(priority, 0) + 1
        return index


class Preemptions:
    """One for each plugin host, because the entry point names the class."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    @impl(wrapper=True)
    def treadle_scheduling_policy(
        self,
    ) -> Generator[None, SchedulingPolicy | None, SchedulingPolicy | None]:
        policy = yield
        return None if policy is None else Counted(policy, self.counts)

    @impl
    def treadle_report(self) -> str | None:
        counts = ", ".join(f"priority {p}: {n}" for p, n in sorted(self.counts.items()))
        return f"preempted {counts}" if counts else None
