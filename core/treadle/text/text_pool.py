"""Work on texts, rendering and encoding, in a few threads beside an event loop.

Pending jobs run shortest first, what their client has had lately counted on top, so that nobody
waits for another's long texts. Two thirds of the threads may do long jobs; one is always left for others.
A job that takes longer than its budget no longer counts as one of the threads. After ten budgets
its caller gets ``TimeoutError``: nothing stops a thread from outside.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.errors import QueueFullError
from treadle.processes.fair_queue import FairQueue
from treadle.processes.watchdog import RETRY_SECONDS, TIMEOUT_FACTOR, PendingCall, WatchdogThread

if TYPE_CHECKING:
    from treadle.plugins.guard import PluginGuard

__all__ = ("MAX_PENDING_CHARS", "MAX_SLOW_JOBS", "SHORT_TEXT", "TextPool")

T = TypeVar("T")
log = logging.getLogger("treadle.text")

NUM_THREADS = 3
SHORT_TEXT = 1024
"""Characters that are encoded on the event loop in one turn of it, in less than a millisecond."""
LONG_TEXT = 65_536
"""Characters from which a job leaves one thread to others."""
MAX_PENDING_CHARS = 64 * 2**20
MAX_SLOW_JOBS = 8
"""Jobs of one plugin over their budgets that get threads of their own. If so many do not return, no job
of it is begun, but one in ``RETRY_SECONDS``."""
CHARS_PER_SECOND = 100_000
"""Characters of a client that are forgotten each second; the budget of a text grows likewise."""


class _Job(PendingCall):
    """A call on a text; ``cost`` is its characters."""

    __slots__ = ("client", "cost", "guard", "is_trial", "timer")

    def __init__(
        self, work: Callable[[], Any], cost: float, client: str, guard: PluginGuard | None
    ) -> None:
        super().__init__(work, asyncio.get_running_loop().create_future())
        self.cost, self.client, self.guard = cost, client, guard
        self.is_trial = False
        self.timer: asyncio.TimerHandle | None = None


class TextPool:
    """Runs jobs of one event loop. Threads start when they are needed.

    ``budget`` is in seconds; a long text has more. ``max_jobs`` bounds the jobs that wait.
    """

    def __init__(self, budget: float, max_jobs: int) -> None:
        self._budget, self._max_jobs = budget, max_jobs
        self._pending: FairQueue[_Job] = FairQueue(CHARS_PER_SECOND)
        self._running: list[_Job] = []
        self._slow: list[_Job] = []
        self._idle: list[WatchdogThread] = []
        self._inline_chars = 0
        self._retry_times: dict[PluginGuard | None, float] = {}

    async def run(
        self,
        work: Callable[[], T],
        size: int,
        *,
        client: str = "",
        guard: PluginGuard | None = None,
        method: str = "encode",
        inline: bool = False,
    ) -> T:
        """Return what ``work``, which reads ``size`` characters, returns or raises.

        Cancelling takes a job out that has not begun. With ``inline`` a short one is done at once. Raises
        ``QueueFullError``, and for ``method`` of the plugin of ``guard`` that does not return its error.
        """
        if inline and self._inline_chars + size <= SHORT_TEXT:
            if not self._inline_chars:
                asyncio.get_running_loop().call_soon(setattr, self, "_inline_chars", 0)
            self._inline_chars += size
            return work()
        chars = sum(job.cost for job in self._pending)
        if self._pending and (
            len(self._pending) >= self._max_jobs or chars + size > MAX_PENDING_CHARS
        ):
            raise QueueFullError(
                f"{len(self._pending)} texts of {chars:.0f} characters wait to be encoded; at most "
                f"{self._max_jobs} texts and {MAX_PENDING_CHARS} characters may: try again later"
            )
        job = _Job(work, size, client, guard)
        self._pending.push(job)
        try:
            stuck = sum(j.future.done() and j.guard is guard for j in self._slow)
            if stuck >= MAX_SLOW_JOBS:
                if monotonic() < self._retry_times.get(guard, 0.0):
                    raise TimeoutError(f"{stuck} threads are stuck in it")
                job.is_trial, self._retry_times[guard] = True, monotonic() + RETRY_SECONDS
            self._start_jobs()
            result: T = await job.future
            return result
        except TimeoutError as error:
            if guard is None:
                raise
            log.error("%s does not return: %s", guard.entry.id, error)
            guard.fail(method, error)
        finally:
            self._pending.discard(job)

    def close(self) -> None:
        """End the threads that have nothing to do."""
        while self._idle:
            self._idle.pop().wake(False)

    def _start_jobs(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._running) < NUM_THREADS and (job := self._next_job()) is not None:
            self._running.append(job)
            seconds = self._budget * (1 + job.cost / CHARS_PER_SECOND)
            job.timer = loop.call_later(seconds, self._overdue, job, seconds)
            thread = self._idle.pop() if self._idle else WatchdogThread(loop, self._deliver)
            thread.calls.append(job)
            thread.wake()

    def _next_job(self) -> _Job | None:
        num_long = sum(job.cost > LONG_TEXT for job in self._running)
        return self._pending.pop(LONG_TEXT if num_long >= NUM_THREADS - 1 else math.inf)

    def _deliver(self, thread: WatchdogThread) -> None:
        job: Any = thread.finished.popleft()
        job.timer.cancel()
        job.complete_future()
        if job in self._running:
            self._running.remove(job)
            self._idle.append(thread)
        else:
            self._slow.remove(job)
            thread.wake(False)
        self._start_jobs()

    def _overdue(self, job: _Job, seconds: float) -> None:
        if job.is_trial or sum(j.guard is job.guard for j in self._slow) < MAX_SLOW_JOBS:
            self._running.remove(job)
            self._slow.append(job)
            self._start_jobs()
        loop, limit = asyncio.get_running_loop(), TIMEOUT_FACTOR * seconds
        job.timer = loop.call_later(limit - seconds, self._give_up, job, limit)

    def _give_up(self, job: _Job, limit: float) -> None:
        self._retry_times[job.guard] = monotonic() + RETRY_SECONDS
        if not job.future.done():
            job.future.set_exception(TimeoutError(f"a call took longer than {limit:g} s"))
