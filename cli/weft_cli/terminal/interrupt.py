"""Ctrl-C as a question instead of an exception.

An engine that runs in this thread must not be torn out of the middle of a step, so the first
Ctrl-C only sets a mark that is looked at between updates. A second one is an exception again: it
ends a program whose engine does not come back.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ("Interrupt",)


class Interrupt:
    """Inside the ``with`` block, ``seen`` tells whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.seen = False
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
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
