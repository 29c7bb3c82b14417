"""How many kernels are compiled while requests wait for them."""

from __future__ import annotations

import logging
import weakref
from importlib.util import find_spec

__all__ = ("Compilations",)

log = logging.getLogger(__name__)


class Compilations:
    """Counts the kernels that Triton loads onto a device, those in Gluon among them, from its creation on.

    A kernel is loaded once for each variant, after it has been compiled or read from disk.
    """

    def __init__(self) -> None:
        self._count = 0
        if find_spec("triton") is None:
            return
        from triton import knobs

        counter = weakref.ref(self)

        def loaded(module: object, function: object, name: str, *_: object) -> None:
            if (alive := counter()) is not None:
                alive.add(name)

        hooks = knobs.runtime.kernel_load_end_hook
        hooks.add(loaded)
        weakref.finalize(self, hooks.remove, loaded)

    def add(self, name: str) -> None:
        """Count a kernel."""
        self._count += 1
        log.info("kernel %s was compiled or read from disk after the start", name)

    def count(self) -> int:
        return self._count
