"""Ctrl-C as a flag instead of an exception.

An exception must not interrupt an engine that runs in this thread in the middle of a step, so the
first Ctrl-C only sets a flag that is read between updates. One pressed a second later raises
``KeyboardInterrupt`` again: it ends a program whose engine hangs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ("Interrupt", "interruptible", "uninterrupted")


class Interrupt:
    """Inside the ``with`` block, ``is_interrupted`` is whether Ctrl-C was pressed.

    Pressing it again within ``grace_seconds`` has no further effect; later it raises
    ``KeyboardInterrupt``.
    """

    def __init__(self, grace_seconds: float = 1.0) -> None:
        self.is_interrupted = False
        self._grace_seconds = grace_seconds
        self._first_time = 0.0
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._handle_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.is_interrupted:
            self.is_interrupted, self._first_time = True, now
        elif now - self._first_time >= self._grace_seconds:
            raise KeyboardInterrupt


@contextmanager
def _with_handler(handler: Any) -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def uninterrupted() -> Any:
    """A block in which Ctrl-C does nothing, except inside ``Interrupt`` or ``interruptible``."""
    return _with_handler(lambda number, frame: None)


def interruptible() -> Any:
    """A block in which Ctrl-C raises ``KeyboardInterrupt``."""
    return _with_handler(signal.default_int_handler)
