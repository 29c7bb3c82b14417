"""The time limit of a start that runs in the engine's own thread."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import signal
import threading
from types import TracebackType
from typing import Any

from treadle.errors import EngineError
from treadle_worker_kit.messages import Progress
from treadle_worker_kit.monitor import StartMonitor

__all__ = ("StartWatch",)

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
SIGNAL = signal.SIGUSR2
"""Interrupts the main thread, also while it sleeps, waits for a lock or reads a file."""


class StartTimeout(Exception):
    """Raised in the thread that starts, by the one that watches it."""


class StartWatch:
    """Ends the block that it encloses with ``EngineError`` if one stage of it takes too long.

    The stacks of all threads are written to the standard error then. Code of a library that never
    returns to the interpreter cannot be ended: its stage is in the log.
    """

    def __init__(self, limit: float, poll_seconds: float = POLL_SECONDS) -> None:
        """``limit`` are the seconds that one stage may take."""
        self._monitor = StartMonitor(1, limit)
        self._poll_seconds = poll_seconds
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failure: EngineError | None = None
        self._thread = threading.current_thread()
        self._watcher = threading.Thread(target=self._watch, name="start-watch", daemon=True)
        self._handler: Any = None

    def enter(self, stage: str) -> None:
        """Note that a stage begins, or that it has made progress."""
        self._monitor.update(0, Progress(stage))

    def __enter__(self) -> StartWatch:
        if self._thread is threading.main_thread():
            self._handler = signal.signal(SIGNAL, _raise_timeout)
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:  # from here on, nothing is raised in this thread any more
            self._ended.set()
        self._watcher.join()
        if self._thread is threading.main_thread():
            signal.signal(SIGNAL, self._handler)
        if self._failure is not None:  # whatever the block made of the exception
            raise self._failure from error

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_seconds):
            try:
                self._monitor.check()
            except EngineError as failure:
                with self._lock:
                    if not self._ended.is_set():
                        self._failure = failure
                        faulthandler.dump_traceback()
                        log.error("%s", failure)
                        self._interrupt()
                return

    def _interrupt(self) -> None:
        thread_id = self._thread.ident or 0
        if self._thread is threading.main_thread():
            signal.pthread_kill(thread_id, SIGNAL)
        else:  # at its next bytecode
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread_id), ctypes.py_object(StartTimeout)
            )


def _raise_timeout(*_: object) -> None:
    raise StartTimeout
