"""Calls of plugins in a thread that can be abandoned: nothing stops a thread from outside.

All calls submitted in one iteration of the event loop are handed to the thread together, to spread
the cost of the thread switch. A call that takes longer than its budget keeps its thread, and the
calls after it move to another. After ten budgets its caller gets ``TimeoutError``, and the thread
is only counted until it returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

__all__ = (
    "MAX_STUCK_THREADS",
    "TIMEOUT_FACTOR",
    "PendingCall",
    "WatchdogExecutor",
    "WatchdogThread",
)

T = TypeVar("T")

TIMEOUT_FACTOR = 10
"""A call times out after this many budgets."""
MAX_STUCK_THREADS = 4
"""Number of abandoned threads from which no call is made until one of them returns."""


class PendingCall:
    """One call and the future that receives its result."""

    __slots__ = ("abandoned", "error", "future", "result", "start_time", "work")

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.work, self.future = work, future
        self.start_time = 0.0
        self.abandoned = False
        self.result: Any = None
        self.error: Exception | None = None

    def complete_future(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        elif isinstance(self.error, StopIteration):  # a future does not accept it
            self.future.set_exception(RuntimeError(f"StopIteration: {self.error}"))
        else:
            self.future.set_exception(self.error)


class WatchdogThread:
    """One thread. It owns a call from ``popleft`` on; all else happens on the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[WatchdogThread], None]
    ) -> None:
        self.calls: deque[PendingCall] = deque()
        self.finished: deque[PendingCall] = deque()
        self.current: PendingCall | None = None
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._loop, self._deliver = loop, deliver
        # A daemon: a thread that never returns must not keep the process alive.
        threading.Thread(target=self._run, name="treadle-plugin", daemon=True).start()

    def wake(self, keep_running: bool = True) -> None:
        self._wakeups.put(keep_running)

    def _run(self) -> None:
        while self._wakeups.get():
            while self.calls:
                try:
                    call = self.calls.popleft()
                except IndexError:  # moved to another thread
                    break
                call.start_time = monotonic()
                self.current = call
                try:
                    call.result = call.work()
                except Exception as error:
                    call.error = error
                except BaseException as error:  # meant for a process, or a panic of a Rust library
                    call.error = RuntimeError(f"{type(error).__name__}: {error}")
                self.current = None
                self.finished.append(call)
            try:
                self._loop.call_soon_threadsafe(self._deliver, self)
            except RuntimeError:  # the loop is closed
                return


class WatchdogExecutor:
    """Runs calls one after another, in a thread that is replaced if one takes too long.

    Used from one event loop. ``budget`` is in seconds.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self._thread: WatchdogThread | None = None
        self._slow_threads: list[WatchdogThread] = []
        self._num_waiting = 0
        self._wake_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_stuck(self) -> int:
        """Threads whose call has timed out and has not returned."""
        return sum((call := t.current) is not None and call.abandoned for t in self._slow_threads)

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Return a future of what ``work`` returns or raises.

        It raises ``TimeoutError`` if the call takes too long (it may still be running), or at once
        while too many threads are stuck.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._slow_threads and self.num_stuck >= MAX_STUCK_THREADS:
            future.set_exception(TimeoutError(f"{MAX_STUCK_THREADS} threads are stuck in plugins"))
            return future
        if self._thread is None:
            self._thread = WatchdogThread(loop, self._deliver)
        self._thread.calls.append(PendingCall(work, future))
        self._num_waiting += 1
        if not self._wake_scheduled:
            self._wake_scheduled = True
            loop.call_soon(self._wake)
        if self._timer is None:
            self._timer = loop.call_later(self.budget, self._check)
        return future

    def discard_stuck(self) -> None:
        """Stop counting stuck threads, because the code that they run is not used any more."""
        self._slow_threads = [
            t for t in self._slow_threads if (call := t.current) is None or not call.abandoned
        ]

    def close(self) -> None:
        """End the thread once its calls have returned. A later call starts another one."""
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.wake(False)
        self._timer = self._thread = None

    def _wake(self) -> None:
        self._wake_scheduled = False
        if self._thread is not None:
            self._thread.wake()

    def _deliver(self, thread: WatchdogThread) -> None:
        while thread.finished:
            call = thread.finished.popleft()
            if not call.abandoned:
                self._num_waiting -= 1
                call.complete_future()
        if thread in self._slow_threads and thread.current is None:
            self._slow_threads.remove(thread)

    def _check(self) -> None:
        loop, now = asyncio.get_running_loop(), monotonic()
        thread = self._thread
        if thread is not None and (call := thread.current) and now - call.start_time > self.budget:
            self._replace(thread)
        max_seconds = TIMEOUT_FACTOR * self.budget
        for slow_thread in self._slow_threads:
            running = slow_thread.current
            if running is None or running.abandoned or now - running.start_time <= max_seconds:
                continue
            running.abandoned = True
            self._num_waiting -= 1
            if not running.future.done():
                running.future.set_exception(
                    TimeoutError(f"a call took longer than {max_seconds:g} s")
                )
        self._timer = loop.call_later(self.budget, self._check) if self._num_waiting else None

    def _replace(self, thread: WatchdogThread) -> None:
        """Move the calls after a slow one to a new thread."""
        self._deliver(thread)
        self._slow_threads.append(thread)
        thread.wake(False)  # it ends when its call returns
        self._thread = WatchdogThread(asyncio.get_running_loop(), self._deliver)
        while thread.calls:
            try:
                self._thread.calls.append(thread.calls.popleft())
            except IndexError:  # its call has returned, and it took the last one itself
                break
        self._thread.wake()
