"""A start without collections of garbage: it makes nearly a million objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("without_collections",)

FEW_FROZEN = 1000
"""Python 3.12 itself begins with 375 frozen objects; a program that freezes some has more."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Let Python collect no garbage, in any thread of this process. May be nested.

    Imports of torch and Triton, and the capture of steps, would be interrupted some hundred times.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < FEW_FROZEN:
            # What was made is old from now on. As new objects, all would be looked at at once.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
