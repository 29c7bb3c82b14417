"""Numbers and their scales, as the kernels of packed weights read them from ``treadle_layers_kit.packed_layout``."""

# Kernels are compiled from their source: their arguments are pointers and constants without types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle_kernels_triton.lookup import assembly
from treadle_layers_kit.packed_layout import FP8, PLACES, Levels

__all__ = ("constants_of", "load_steps", "numbers", "scaled_numbers", "table_of")


@triton.jit
def numbers(
    words,
    levels,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
    PLACES: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Four tiles of numbers in DTYPE, one for each place of the words; of two places, each twice."""
    if ASM == "":
        if PLACES == 4:
            w0 = tl.load(levels + (words & 15)).to(DTYPE)
            w1 = tl.load(levels + ((words >> 4) & 15)).to(DTYPE)
            w2 = tl.load(levels + ((words >> 8) & 15)).to(DTYPE)
            w3 = tl.load(levels + ((words >> 12) & 15)).to(DTYPE)
            return w0, w1, w2, w3
        low, high = words.to(tl.int8), (words >> 8).to(tl.int8)
        if FLOATS:
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        w0, w1 = low.to(tl.float32).to(DTYPE), high.to(tl.float32).to(DTYPE)
        return w0, w1, w0, w1
    elif PLACES == 4 and DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif PLACES == 4:
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif DTYPE.is_bf16():
        w0, w1 = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        return w0, w1, w0, w1
    else:
        w0, w1 = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        return w0, w1, w0, w1


@triton.jit
def scaled_numbers(words, levels, s0, s1, s2, s3, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """As ``numbers``, of four places, each times its scale ``[N]``, which is in DTYPE; with ASM less by a power."""
    f0, f1, f2, f3 = s0[:, None], s1[:, None], s2[:, None], s3[:, None]
    if ASM == "":
        w0, w1, w2, w3 = numbers(words, levels, DTYPE, "", 4, False)
        return w0 * f0, w1 * f1, w2 * f2, w3 * f3
    elif DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, f0, f1, f2, f3], is_pure=True, pack=2,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, f0, f1, f2, f3], is_pure=True, pack=2,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        )  # fmt: skip


@triton.jit
def load_steps(
    steps, group, offs_n, N, mask,
    HAS: tl.constexpr, DTYPE: tl.constexpr = tl.float32, POWER: tl.constexpr = 1.0,
):  # fmt: skip
    """``[N]`` of one group times POWER, in DTYPE; uint8 are exponents."""
    if not HAS:
        return tl.zeros([offs_n.shape[0]], DTYPE)
    value = tl.load(steps + group.to(tl.int64) * N + offs_n, mask=mask, other=0.0)
    if steps.dtype.element_ty == tl.uint8:
        return ((value.to(tl.int32) << 23).to(tl.float32, bitcast=True) * POWER).to(DTYPE)
    return (value.to(tl.float32) * POWER).to(DTYPE)


def constants_of(
    codes: Tensor,
    scales: Tensor | None,
    offsets: Tensor | None,
    factors: Tensor | None,
    levels: Levels,
    group: int,
    dtype: torch.dtype,
    fold: bool = False,
) -> dict[str, object]:
    return {
        "GROUP": group,
        "RUN": codes.shape[-1],
        "PLACES": PLACES[isinstance(levels, str)],
        "FLOATS": levels == FP8,
        "ASM": assembly(levels, dtype, fold) if codes.is_cuda else "",
        "HAS_SCALES": scales is not None,
        "HAS_OFFSETS": offsets is not None,
        "HAS_FACTORS": factors is not None,
    }


def table_of(levels: Levels, codes: Tensor) -> Tensor:
    """Where the kernel reads no levels, any tensor."""
    return codes if isinstance(levels, str) or codes.is_cuda else torch.tensor(levels)
