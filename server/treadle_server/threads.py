"""DaemonThreadPool for the handlers of plugins that are no coroutines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

__all__ = ("DaemonThreadPool",)

P = ParamSpec("P")
T = TypeVar("T")

MOST = 40
"""Calls at the same time; others wait for one to end."""


class DaemonThreadPool(Executor):
    """Like a ``ThreadPoolExecutor``, whose threads the process would wait for when it ends: one that
    hangs in a plugin would keep it for ever. These die with it."""

    def __init__(self, most: int = MOST) -> None:
        self._free = threading.Semaphore(0)
        self._left = most
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Called from one thread."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # it is the caller's
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        if not self._free.acquire(blocking=False) and self._left:
            self._left -= 1
            threading.Thread(target=self._run, name="treadle-handler", daemon=True).start()
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing is waited for."""

    def _run(self) -> None:
        while True:
            self._jobs.get()()
            self._free.release()
