"""Programmatic dependent launch: a kernel starts while the one before it is still running.

A decode step is a chain of kernels that each take a few microseconds, of which one or two are its
start and end. On Hopper a kernel may start early, do what depends on nothing (address arithmetic, and
above all loads of weights), and only then wait until the kernel before it has finished.

Every kernel that is launched so must call ``await_results`` in all programs, before its first access
to anything that another kernel of the step writes: whoever waits for it relies on its having waited.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ("await_results", "start_next")


@triton.jit
def start_next(EARLY: tl.constexpr):
    """The next kernel may start as soon as all programs of this one got here."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def await_results(EARLY: tl.constexpr):
    """Wait until the kernel before this one has finished and what it wrote can be read."""
    if EARLY:
        gdc_wait()
