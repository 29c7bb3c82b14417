"""Calls of plugins in a thread that can be given up: nothing stops a thread from outside.

One hop serves all calls of a turn of the event loop, so that it costs little for each of them. A
call that takes longer than its budget keeps its thread for itself, and the calls behind it move to
another. Ten times the budget is the end: whoever waits for it goes on without it, and so does its
thread, which is only counted.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

__all__ = ("MOST_STUCK", "PATIENCE", "Watch")

T = TypeVar("T")

PATIENCE = 10
"""Budgets after which nobody waits any more."""
MOST_STUCK = 4
"""Threads given up after which no call is made until one of them comes back."""


class Job:
    __slots__ = ("began", "error", "future", "given_up", "result", "work")

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.work, self.future = work, future
        self.began = 0.0
        self.given_up = False
        self.result: Any = None
        self.error: Exception | None = None

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        elif isinstance(self.error, StopIteration):  # which a future does not take
            self.future.set_exception(RuntimeError(f"StopIteration: {self.error}"))
        else:
            self.future.set_exception(self.error)


class Worker:
    """One thread. It owns a job from ``popleft`` on; all else happens on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Worker], None]) -> None:
        self.jobs: deque[Job] = deque()
        self.finished: deque[Job] = deque()
        self.current: Job | None = None
        self._more: SimpleQueue[bool] = SimpleQueue()
        self._loop, self._deliver = loop, deliver
        # A thread that does not come back must not keep the process.
        threading.Thread(target=self._run, name="treadle-parser", daemon=True).start()

    def wake(self, go_on: bool = True) -> None:
        self._more.put(go_on)

    def _run(self) -> None:
        while self._more.get():
            while self.jobs:
                try:
                    job = self.jobs.popleft()
                except IndexError:  # moved to another thread
                    break
                job.began = monotonic()
                self.current = job
                try:
                    job.result = job.work()
                except Exception as error:
                    job.error = error
                except BaseException as error:  # meant for a process, or a panic of a Rust library
                    job.error = RuntimeError(f"{type(error).__name__}: {error}")
                self.current = None
                self.finished.append(job)
            try:
                self._loop.call_soon_threadsafe(self._deliver, self)
            except RuntimeError:  # the loop is closed
                return


class Watch:
    """Used from one event loop. ``budget`` is in seconds."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._worker: Worker | None = None
        self._slow: list[Worker] = []
        self._open = 0
        self._waking = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Calls that nobody has given up and that have not come back."""
        return self._open

    @property
    def stuck(self) -> int:
        """Threads that were given up and have not come back."""
        return sum((job := w.current) is not None and job.given_up for w in self._slow)

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """What ``work`` returns or raises. ``TimeoutError`` if it takes too long, or at once if too
        many others have; it may then still be running."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._slow and self.stuck >= MOST_STUCK:
            future.set_exception(TimeoutError(f"{MOST_STUCK} threads are stuck in plugins"))
            return future
        if self._worker is None:
            self._worker = Worker(loop, self._deliver)
        self._worker.jobs.append(Job(work, future))
        self._open += 1
        if not self._waking:
            self._waking = True
            loop.call_soon(self._wake)
        if self._timer is None:
            self._timer = loop.call_later(self.budget, self._look)
        return future

    def forget(self) -> None:
        """The code that is stuck is out of use: its threads do not count any more."""
        self._slow = [w for w in self._slow if (job := w.current) is None or not job.given_up]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is not None:
            self._worker.wake(False)

    def _wake(self) -> None:
        self._waking = False
        if self._worker is not None:
            self._worker.wake()

    def _deliver(self, worker: Worker) -> None:
        while worker.finished:
            job = worker.finished.popleft()
            if not job.given_up:
                self._open -= 1
                job.settle()
        if worker in self._slow and worker.current is None:
            self._slow.remove(worker)

    def _look(self) -> None:
        loop, now = asyncio.get_running_loop(), monotonic()
        worker = self._worker
        if worker is not None and (job := worker.current) and now - job.began > self.budget:
            self._deliver(worker)
            self._slow.append(worker)
            worker.wake(False)  # it ends when it comes back
            self._worker = Worker(loop, self._deliver)
            while worker.jobs:
                try:
                    self._worker.jobs.append(worker.jobs.popleft())
                except IndexError:  # it has come back and taken the last one
                    break
            self._worker.wake()
        for slow in self._slow:
            job = slow.current
            most = PATIENCE * self.budget
            if job is not None and not job.given_up and now - job.began > most:
                job.given_up = True
                self._open -= 1
                if not job.future.done():
                    job.future.set_exception(TimeoutError(f"a call took longer than {most:g} s"))
        self._timer = loop.call_later(self.budget, self._look) if self._open else None
