"""Primitives of kernels in Gluon: PDL, barriers, and pairs of 16-bit numbers in one register."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = (
    "launch_dependents",
    "pack_columns",
    "round_pair",
    "split_pairs",
    "thread_barrier",
    "wait_for_previous_kernel",
)

# Renamed after Triton 3.6.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def launch_dependents():
    """``pdl.launch_dependents`` for kernels in Gluon."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_previous_kernel():
    """``pdl.wait_for_previous_kernel`` for kernels in Gluon."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def round_pair(low, high, dtype: gl.constexpr):
    """Return two float32 rounded to ``dtype`` in one int32, ``low`` in its lower half."""
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + name + ".f32 $0, $2, $1;",
        "=r,f,f",
        [low, high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pack_columns(x, dtype: gl.constexpr):
    """Return float32 ``x [m, n]`` rounded to ``dtype`` as int32 ``[m, n / 2]``, columns by twos.

    Loops carry 16-bit values in a register each; packed, they need half as many.
    """
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return round_pair(low, high, dtype)


@gluon.jit
def split_pairs(x, dtype: gl.constexpr):
    """Return the lower and the upper halves of int32 ``x``, each as ``dtype``."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
