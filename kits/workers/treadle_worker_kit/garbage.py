"""A start without collections of garbage: it makes nearly a million objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("without_collections",)


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
        if not gc.get_freeze_count():
            # What was made is old from now on. As new objects, all would be looked at at once.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
