"""Programmatic dependent launch (PDL): a kernel starts while the previous one is still running.

A decode step is a chain of kernels that each take a few microseconds, of which one or two are its
start and end. On Hopper a kernel may start early, do what depends on nothing (address arithmetic, and
above all loads of weights), and only then wait until the previous kernel has finished.

Every kernel that is launched with ``launch_pdl=True`` must call ``wait_for_previous_kernel`` in all
programs, before its first access to anything that another kernel of the step writes: a kernel that
waits for it relies on its having waited.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ("launch_dependents", "wait_for_previous_kernel")


@triton.jit
def launch_dependents(USE_PDL: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one got here."""
    if USE_PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous_kernel(USE_PDL: tl.constexpr):
    """Wait until the previous kernel has finished and its results can be read."""
    if USE_PDL:
        gdc_wait()
