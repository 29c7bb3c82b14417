"""Calls of plugins in a thread that can be abandoned: nothing stops a thread from outside.

All calls submitted in one iteration of the event loop are handed to the thread together, to spread the cost of the
thread switch. A call that takes longer than its budget keeps its thread, and the calls after it move to another.
After ten budgets its caller gets ``TimeoutError``, and the thread is only counted until it returns.
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
    "PluginThreads",
    "WatchdogExecutor",
    "WatchdogThread",
)

T = TypeVar("T")

TIMEOUT_FACTOR = 10
"""A call times out after this many budgets."""
MAX_STUCK_THREADS = 4
"""Abandoned threads of one plugin from which no call is made, but one in ``RETRY_SECONDS``."""
RETRY_SECONDS = 60.0


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
        self.retry_time = 0.0
        self.num_waiting = 0
        self._wake_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_stuck(self) -> int:
        """Threads whose call has timed out and has not returned."""
        return sum((call := t.current) is not None and call.abandoned for t in self._slow_threads)

    @property
    def is_broken(self) -> bool:
        """Whether so many threads are stuck that calls are refused, but for a trial in a while."""
        return bool(self._slow_threads) and self.num_stuck >= MAX_STUCK_THREADS

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Return a future of what ``work`` returns or raises.

        It raises ``TimeoutError`` if the call takes too long (it may still be running), or at once
        while too many threads are stuck.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self.is_broken:
            if monotonic() < self.retry_time:
                future.set_exception(TimeoutError(f"{self.num_stuck} threads are stuck in it"))
                return future
            self.retry_time = monotonic() + RETRY_SECONDS
        if self._thread is None:
            self._thread = WatchdogThread(loop, self._deliver)
        self._thread.calls.append(PendingCall(work, future))
        self.num_waiting += 1
        if not self._wake_scheduled:
            self._wake_scheduled = True
            loop.call_soon(self._wake)
        if self._timer is None:
            self._timer = loop.call_later(self.budget, self._check)
        return future

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
                self.num_waiting -= 1
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
            self.retry_time = now + RETRY_SECONDS
            self.num_waiting -= 1
            if not running.future.done():
                running.future.set_exception(
                    TimeoutError(f"a call took longer than {max_seconds:g} s")
                )
        self._timer = loop.call_later(self.budget, self._check) if self.num_waiting else None

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


class PluginThreads(dict[str, WatchdogExecutor]):
    """The executors of plugins by name: none waits for another, or pays for one that hangs."""

    def __init__(self, budget: float) -> None:
        self.budget = budget

    def __missing__(self, plugin: str) -> WatchdogExecutor:
        self[plugin] = executor = WatchdogExecutor(self.budget)
        return executor

    def close(self) -> None:
        """End the idle threads, and forget those that are stuck."""
        for executor in self.values():
            if not executor.num_waiting:
                executor.close()
        self.clear()
