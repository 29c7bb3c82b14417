"""Launches that may be left out, and what a program of a launch may have."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime import driver

__all__ = ("launch", "shared_bytes")


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, compile_only: bool = False, **options: Any
) -> None:
    """Launch a Triton ``kernel``; if ``compile_only``, just compile it for these arguments and load it.

    The same launch then does neither. In Triton's interpreter there is nothing to compile.
    """
    if not compile_only:
        kernel[grid](*args, **options)
        return
    compiled = kernel.warmup(*args, grid=grid, **options)
    if compiled is not None:
        _ = compiled.run  # reading it loads the kernel onto the device


def shared_bytes() -> int:
    """Return how much shared memory a program may have on the current device."""
    properties = driver.active.utils.get_device_properties(torch.cuda.current_device())
    return int(properties["max_shared_mem"])
