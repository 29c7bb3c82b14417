"""Ctrl-C as a question instead of an exception.

An engine that runs in this thread must not be torn out of the middle of a step, so the first
Ctrl-C only sets a mark that is looked at between updates. One that comes a second later is an
exception again: it ends a program whose engine does not come back.
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
    """Inside the ``with`` block, ``seen`` tells whether Ctrl-C was pressed.

    Within ``patience`` seconds further ones mean the same: impatient fingers press twice.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self.seen = False
        self._patience = patience
        self._since = 0.0
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._mark)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.seen:
            self.seen, self._since = True, now
        elif now - self._since >= self._patience:
            raise KeyboardInterrupt


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def uninterrupted() -> Any:
    """A block in which Ctrl-C does nothing, but where ``Interrupt`` or ``interruptible`` say so."""
    return _handled(lambda number, frame: None)


def interruptible() -> Any:
    """A block in which Ctrl-C raises ``KeyboardInterrupt``."""
    return _handled(signal.default_int_handler)
