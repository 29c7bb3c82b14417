"""Whose job is next: a cheap one, and one of a client that has had little lately."""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import monotonic
from typing import Generic, Protocol, TypeVar

__all__ = ("FairQueue", "QueuedJob")


class QueuedJob(Protocol):
    """A hashable job. ``client`` is whose it is; ``cost`` is in any unit, the same for all."""

    client: str
    cost: float


J = TypeVar("J", bound=QueuedJob)


class FairQueue(Generic[J]):
    """Pending jobs, the cheapest first. What its client has had lately counts on top of a job.

    ``rate`` is the cost that a client is forgiven each second. A job that waits moves ahead as if
    its own cost shrank as fast, so that cheap ones do not pass it for ever. Not thread-safe.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._arrivals: dict[J, float] = {}
        self._debt_ends: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[J]:
        return iter(self._arrivals)

    def push(self, job: J) -> None:
        self._arrivals[job] = monotonic()

    def discard(self, job: J) -> bool:
        """Take a job out. Return ``False`` if it is not pending."""
        return self._arrivals.pop(job, None) is not None

    def pop(self, max_cost: float = math.inf) -> J | None:
        """Take out the next job that costs at most ``max_cost``, and charge its client for it."""
        now = monotonic()
        jobs = (job for job in self._arrivals if job.cost <= max_cost)
        job = min(jobs, key=lambda job: self._rank(job, now), default=None)
        if job is not None:
            del self._arrivals[job]
            self.charge(job.client, job.cost)
        return job

    def charge(self, client: str, cost: float) -> None:
        """Count ``cost`` against a client, more than ``pop`` did."""
        now = monotonic()
        self._debt_ends = {name: end for name, end in self._debt_ends.items() if end > now}
        self._debt_ends[client] = self._debt_ends.get(client, now) + cost / self._rate

    def _rank(self, job: J, now: float) -> float:
        debt = max(0.0, self._debt_ends.get(job.client, now) - now)
        return job.cost + self._rate * (self._arrivals[job] + debt)
