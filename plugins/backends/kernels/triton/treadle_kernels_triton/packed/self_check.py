"""Whether the kernels are right on this device, which nothing but a trial can tell."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from treadle_kernels_triton.packed import kernel
from treadle_kernels_triton.packed.tiles import tile_of
from treadle_kernels_triton.packed.unpack import unpack
from treadle_layers_kit.packed_layout import E2M1, FP8, INT8, Levels, pack_words
from treadle_layers_kit.packed_layout import unpack as unpack_in_torch

__all__ = ("check_kernels",)

OUT_FEATURES, IN_FEATURES, GROUP = 192, 512, 32
"""The first is no multiple of a tile's."""
ROWS = (3, 40)
LEVELS: Levels = tuple((7 * i % 16 - 7.5) / 8 for i in range(16))
COUNTED: Levels = tuple(float(i - 8) for i in range(16))


def check_kernels(bits: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all results are those of the plain product."""
    generator = torch.Generator(device).manual_seed(0)
    counters = torch.zeros(4096, dtype=torch.int32, device=device)
    groups = (IN_FEATURES // GROUP, OUT_FEATURES)
    scales = (torch.rand(groups, generator=generator, device=device) + 0.5).half()
    shape = (OUT_FEATURES, IN_FEATURES)
    exponents = (scales.float() * 8).to(torch.uint8) + 123  # folded into the numbers, in bfloat16
    four = ((LEVELS, scales, None), (COUNTED, scales, scales), (E2M1, exponents, None))
    for levels, steps, offsets in (
        four if bits == 4 else ((INT8, scales, None), (FP8, scales, None))
    ):
        # Of FP8 no exponent is the largest: there lies NaN.
        last = 16 if bits == 4 else 256 if levels == INT8 else 0x78
        codes = torch.randint(last, shape, generator=generator, device=device).to(torch.uint8)
        weight = (pack_words(codes, levels, GROUP), steps, offsets, None, levels)
        dense = unpack_in_torch(*weight, IN_FEATURES, GROUP)
        unpacked = unpack(*weight, IN_FEATURES, GROUP, dtype)
        if not (unpacked.float() - dense).norm() < 0.02 * dense.norm():
            return False
        for rows in ROWS:
            x = torch.randn(rows, IN_FEATURES, generator=generator, device=device).to(dtype)
            y = kernel.multiply(
                x,
                *weight,
                GROUP,
                tile_of(rows, folds=kernel.folds(*weight[1:3], levels, dtype)),
                counters,
                132,
            )
            expected = F.linear(x.float(), dense)
            if not (y.float() - expected).norm() < 0.02 * expected.norm():
                return False
    return True
