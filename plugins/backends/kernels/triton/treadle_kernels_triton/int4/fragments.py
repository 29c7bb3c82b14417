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

__all__ = ("dequantize", "flatten", "fragment", "store_output", "unflatten", "unpack_scales")


def _dequantize_asm(half: int, bias: str, work: str) -> gl.constexpr:
    """Codes at two places of a pair of words, less zeros, times scales; $3 and $4 are those.

    A code below the bits of 128 (1024 in float16) is that number plus the code.
    """
    lines = ["{ .reg .b32 t, one, none; mov.b32 one, 0x3f803f80; mov.b32 none, 0x80008000;"]
    for operand, nibble in enumerate((2 * half, 2 * half + 1)):
        lines.append(f"shr.b32 t, $2, {4 * nibble};" if nibble else "mov.b32 t, $2;")
        lines.append(f"lop3.b32 t, t, 0x000f000f, {bias}, 0xea;")
        lines.append(work.replace("$to", f"${operand}"))
    return gl.constexpr(" ".join(lines) + " }")


# The addition is exact; bfloat16's is an instruction of tensor maths only as part of a product.
_APPLY_SCALE_BF16 = "fma.rn.bf16x2 t, t, one, $3; fma.rn.bf16x2 $to, t, $4, none;"
_APPLY_SCALE_FP16 = "add.rn.f16x2 t, t, $3; mul.rn.f16x2 $to, t, $4;"
_BF16_HALF0, _BF16_HALF1 = (
    _dequantize_asm(half, "0x43004300", _APPLY_SCALE_BF16) for half in range(2)
)
_FP16_HALF0, _FP16_HALF1 = (
    _dequantize_asm(half, "0x64006400", _APPLY_SCALE_FP16) for half in range(2)
)
_UNPACK_ZERO = gl.constexpr("prmt.b32 $0, $1, 0, 0x1010;")
_UNPACK_SCALE_FP16 = gl.constexpr("prmt.b32 $0, $1, 0, 0x3232;")
_UNPACK_SCALE_BF16 = gl.constexpr(
    "{ .reg .b16 low, high; .reg .f32 f; mov.b32 {low, high}, $1;"
    " cvt.f32.f16 f, high; cvt.rn.bf16x2.f32 $0, f, f; }"
)


@gluon.jit
def dequantize(pairs, zero_scale, HALF: gl.constexpr, DTYPE: gl.constexpr):
    """Of ``pairs [64, 16]`` the weights of 64 inputs, half a chunk: by twos, for both places."""
    asm_bf16: gl.constexpr = _BF16_HALF0 if HALF == 0 else _BF16_HALF1
    asm_fp16: gl.constexpr = _FP16_HALF0 if HALF == 0 else _FP16_HALF1
    asm: gl.constexpr = asm_bf16 if DTYPE.is_bf16() else asm_fp16
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,r,r,r", [pairs, zero_scale[0], zero_scale[1]],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack_scales(scales_and_zeros, DTYPE: gl.constexpr):
    """Of steps ``[64]``: minus biased zeros and scales, twice each, ``[64, 1]``."""
    zero = gl.inline_asm_elementwise(
        _UNPACK_ZERO, "=r,r", [scales_and_zeros], gl.int32, is_pure=True, pack=1
    )
    asm: gl.constexpr = _UNPACK_SCALE_BF16 if DTYPE.is_bf16() else _UNPACK_SCALE_FP16
    scale = gl.inline_asm_elementwise(
        asm, "=r,r", [scales_and_zeros], gl.int32, is_pure=True, pack=1
    )
    return zero[:, None], scale[:, None]


@gluon.jit
def split_pair(x):
    """``[64, 16]`` of twos to ``[64, 32]``."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), [64, 32])


@gluon.jit
def fragment(pairs, DTYPE: gl.constexpr, OPERAND_LAYOUT: gl.constexpr):
    """``[64, 64]`` of the layout ``OPERAND_LAYOUT`` from what ``dequantize`` made: nothing moves."""
    weights = gl.permute(
        gl.join(split_pair(pairs[0]), split_pair(pairs[1])), [0, 2, 1]
    )  # output, place, input
    w = gl.reshape(weights, [64, 64]).to(DTYPE, bitcast=True)
    return gl.convert_layout(w, OPERAND_LAYOUT, assert_trivial=True)


@gluon.jit
def flatten(acc, BLOCK_M: gl.constexpr):
    """``[64, BLOCK_M]`` in one dimension, by the place in memory: 16 bytes a thread, side by side."""
    v = gl.reshape(acc, [4, 2, 8, BLOCK_M // 8, 4, 2])  # warp g r, j c e
    return gl.reshape(gl.permute(v, [3, 0, 2, 4, 1, 5]), [64 * BLOCK_M])


@gluon.jit
def unflatten(v, BLOCK_M: gl.constexpr):
    """The inverse of ``flatten``."""
    v = gl.reshape(v, [BLOCK_M // 8, 4, 8, 4, 2, 2])  # j warp r c g e
    return gl.reshape(gl.permute(v, [1, 4, 2, 0, 3, 5]), [64, BLOCK_M])


@gluon.jit
def store_output(out, acc, n_start, m_start, M, N, BLOCK_M: gl.constexpr):
    """Store ``acc [64, BLOCK_M]``, of the outputs from ``n_start`` and the rows from ``m_start`` on."""
    # 16 bytes a thread and 32 a row of 16 outputs, by shuffles within warps alone.
    base_regs: gl.constexpr = [[1, 0], [2, 0], [4, 0], [0, 16]]
    num_extra_regs: gl.constexpr = (
        0 if BLOCK_M == 32 else 1 if BLOCK_M == 64 else 2 if BLOCK_M == 128 else 3
    )
    regs: gl.constexpr = base_regs + [[0, 32], [0, 64], [0, 128]][:num_extra_regs]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        regs, [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]], [[16, 0], [32, 0]], [], [64, BLOCK_M]
    )
    y = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    offs_n = n_start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    offs_m = m_start + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    offs = offs_m.to(gl.int64)[None, :] * N + offs_n[:, None]
    gl.store(out + offs, y, mask=(offs_m < M)[None, :] & (offs_n < N)[:, None])
