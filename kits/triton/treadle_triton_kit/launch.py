"""Launches that may be left out: a kernel is compiled and loaded before anybody waits for its results."""

from __future__ import annotations

from typing import Any

__all__ = ("launch",)


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
