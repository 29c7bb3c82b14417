"""The pieces of the kernel: words of four codes become fragments of tensor cores, sums are written.

Thread ``32 warp + 4 r + c`` of a warp group holds, of the left side ``[64, 16]`` of one instruction,
outputs ``16 warp + 8 g + r`` and inputs ``8 h + 2 c + e`` (g, h, e: 0 or 1), those of both ``e`` in one
register. In ``treadle_layers_kit.int4_layout``'s layout the inputs of place ``p`` of a chunk are ``32 p + i``
for the words ``i``; with ``i = 16 t + 8 h + 2 c + e``, 32 bits of memory are two words that differ in
``e`` alone: at each place of them are the codes of one register, 16 bits apart. Nothing moves between
threads, and eight such pairs of words are all that a thread reads of 64 outputs of a chunk.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ("flat", "fragment", "numbers", "scaling", "unflat", "write")


def _assembly(half: int, bias: str, work: str) -> gl.constexpr:
    """Codes at two places of a pair of words, less zeros, times scales; $3 and $4 are those.

    A code below the bits of 128 (1024 in float16) is that number plus the code.
    """
    lines = ["{ .reg .b32 t, one, none; mov.b32 one, 0x3f803f80; mov.b32 none, 0x80008000;"]
    for to, place in enumerate((2 * half, 2 * half + 1)):
        lines.append(f"shr.b32 t, $2, {4 * place};" if place else "mov.b32 t, $2;")
        lines.append(f"lop3.b32 t, t, 0x000f000f, {bias}, 0xea;")
        lines.append(work.replace("$to", f"${to}"))
    return gl.constexpr(" ".join(lines) + " }")


# The addition is exact; bfloat16's is an instruction of tensor maths only as part of a product.
_WORK_B = "fma.rn.bf16x2 t, t, one, $3; fma.rn.bf16x2 $to, t, $4, none;"
_WORK_H = "add.rn.f16x2 t, t, $3; mul.rn.f16x2 $to, t, $4;"
_B0, _B1 = (_assembly(half, "0x43004300", _WORK_B) for half in range(2))
_H0, _H1 = (_assembly(half, "0x64006400", _WORK_H) for half in range(2))
_ZERO = gl.constexpr("prmt.b32 $0, $1, 0, 0x1010;")
_SCALE_H = gl.constexpr("prmt.b32 $0, $1, 0, 0x3232;")
_SCALE_B = gl.constexpr(
    "{ .reg .b16 low, high; .reg .f32 f; mov.b32 {low, high}, $1;"
    " cvt.f32.f16 f, high; cvt.rn.bf16x2.f32 $0, f, f; }"
)


@gluon.jit
def numbers(pairs, way, HALF: gl.constexpr, KIND: gl.constexpr):
    """Of ``pairs [64, 16]`` the weights of 64 inputs, half a chunk: by twos, for both places."""
    b: gl.constexpr = _B0 if HALF == 0 else _B1
    h: gl.constexpr = _H0 if HALF == 0 else _H1
    text: gl.constexpr = b if KIND.is_bf16() else h
    return gl.inline_asm_elementwise(
        text, "=&r,=&r,r,r,r", [pairs, way[0], way[1]],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def scaling(steps, KIND: gl.constexpr):
    """Of steps ``[64]``: minus biased zeros and scales, twice each, ``[64, 1]``."""
    zero = gl.inline_asm_elementwise(_ZERO, "=r,r", [steps], gl.int32, is_pure=True, pack=1)
    text: gl.constexpr = _SCALE_B if KIND.is_bf16() else _SCALE_H
    scale = gl.inline_asm_elementwise(text, "=r,r", [steps], gl.int32, is_pure=True, pack=1)
    return zero[:, None], scale[:, None]


@gluon.jit
def _apart(x):
    """``[64, 16]`` of twos to ``[64, 32]``."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), [64, 32])


@gluon.jit
def fragment(two, KIND: gl.constexpr, A: gl.constexpr):
    """``[64, 64]`` of the layout ``A`` from what ``numbers`` made: nothing moves."""
    both = gl.permute(gl.join(_apart(two[0]), _apart(two[1])), [0, 2, 1])  # output, place, input
    w = gl.reshape(both, [64, 64]).to(KIND, bitcast=True)
    return gl.convert_layout(w, A, assert_trivial=True)


@gluon.jit
def flat(acc, ROWS: gl.constexpr):
    """``[64, ROWS]`` in one dimension, by the place in memory: 16 bytes a thread, side by side."""
    v = gl.reshape(acc, [4, 2, 8, ROWS // 8, 4, 2])  # warp g r, j c e
    return gl.reshape(gl.permute(v, [3, 0, 2, 4, 1, 5]), [64 * ROWS])


@gluon.jit
def unflat(v, ROWS: gl.constexpr):
    """The inverse of ``flat``."""
    v = gl.reshape(v, [ROWS // 8, 4, 8, 4, 2, 2])  # j warp r c g e
    return gl.reshape(gl.permute(v, [1, 4, 2, 0, 3, 5]), [64, ROWS])


@gluon.jit
def write(out, acc, first, row, rows, width, ROWS: gl.constexpr):
    """Store ``acc [64, ROWS]``, of the outputs from ``first`` and the rows from ``row`` on."""
    # 16 bytes a thread and 32 a row of 16 outputs, by shuffles within warps alone.
    few: gl.constexpr = [[1, 0], [2, 0], [4, 0], [0, 16]]
    more: gl.constexpr = 0 if ROWS == 32 else 1 if ROWS == 64 else 2 if ROWS == 128 else 3
    regs: gl.constexpr = few + [[0, 32], [0, 64], [0, 128]][:more]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        regs, [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]], [[16, 0], [32, 0]], [], [64, ROWS]
    )
    y = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    m = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    at = r.to(gl.int64)[None, :] * width + m[:, None]
    gl.store(out + at, y, mask=(r < rows)[None, :] & (m < width)[:, None])
