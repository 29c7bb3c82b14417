"""A pool of daemon threads for the handlers of plugins that are not coroutines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

__all__ = ("DaemonThreadPool",)

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 40
"""Number of concurrent calls; further ones wait in a queue."""


class DaemonThreadPool(ThreadPoolExecutor):
    """A ``ThreadPoolExecutor`` with daemon threads.

    A process waits for the threads of a ``ThreadPoolExecutor`` when it exits, so a plugin that hangs
    would keep it alive. It is one for event loops, which accept no other class, and nothing else is
    inherited.
    """

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._idle_threads = threading.Semaphore(0)
        self._num_startable = max_threads
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call. Must always be called from the same thread."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # the caller handles it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        if not self._idle_threads.acquire(blocking=False) and self._num_startable:
            self._num_startable -= 1
            threading.Thread(target=self._run, name="treadle-handler", daemon=True).start()
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Return at once: running calls are not waited for."""

    def _run(self) -> None:
        while True:
            self._jobs.get()()
            self._idle_threads.release()
