"""Whether the kernels are right on this device, which nothing but a trial can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle_kernels_triton.hopper import packed_product
from treadle_kernels_triton.packed import kernel
from treadle_kernels_triton.packed.tiles import tile_of
from treadle_kernels_triton.packed.unpack import unpack
from treadle_layers_kit.packed_layout import E2M1, FP8, INT8, Levels, pack_words
from treadle_layers_kit.packed_layout import unpack as unpack_in_torch

__all__ = ("check_hopper_kernel", "check_kernels")

OUT_FEATURES, IN_FEATURES, GROUP = 192, 512, 32
"""The first is no multiple of a tile's."""
ROWS = (3, 40)
HOPPER_BLOCK_M = 64
NUM_SMS = 132
"""Multiprocessors, which share tiles."""
LEVELS: Levels = tuple((7 * i % 16 - 7.5) / 8 for i in range(16))
COUNTED: Levels = tuple(float(i - 8) for i in range(16))


Weight = tuple[Tensor, Tensor | None, Tensor | None, None, Levels]


def weights(bits: int, device: torch.device, generator: torch.Generator) -> Iterator[Weight]:
    """Of ``bits``, one for each way in which kernels make numbers."""
    groups = (IN_FEATURES // GROUP, OUT_FEATURES)
    scales = (torch.rand(groups, generator=generator, device=device) + 0.5).half()
    exponents = (scales.float() * 8).to(torch.uint8) + 123  # folded into the numbers, in bfloat16
    four = ((LEVELS, scales, None), (COUNTED, scales, scales), (E2M1, exponents, None))
    for levels, steps, offsets in (
        four if bits == 4 else ((INT8, scales, None), (FP8, scales, None))
    ):
        # Of FP8 no exponent is the largest: there lies NaN.
        last = 16 if bits == 4 else 256 if levels == INT8 else 0x78
        shape = (OUT_FEATURES, IN_FEATURES)
        codes = torch.randint(last, shape, generator=generator, device=device).to(torch.uint8)
        yield pack_words(codes, levels, GROUP), steps, offsets, None, levels


def check_kernels(bits: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all results of Triton's kernels are those of the plain product."""
    generator = torch.Generator(device).manual_seed(0)
    counters = torch.zeros(4096, dtype=torch.int32, device=device)
    for weight in weights(bits, device, generator):
        dense = unpack_in_torch(*weight, IN_FEATURES, GROUP)
        unpacked = unpack(*weight, IN_FEATURES, GROUP, dtype)
        if not (unpacked.float() - dense).norm() < 0.02 * dense.norm():
            return False
        for rows in ROWS:
            tile = tile_of(rows, folds=kernel.folds(*weight[1:3], weight[4], dtype))
            product = partial(kernel.multiply, tile=tile)
            if not is_right(product, rows, weight, dense, dtype, counters, generator):
                return False
    return True


def check_hopper_kernel(bits: int, dtype: torch.dtype, device: torch.device) -> bool:
    """The same of Hopper's, which shares tiles among multiprocessors."""
    generator = torch.Generator(device).manual_seed(0)
    counters = torch.zeros(4 * NUM_SMS, dtype=torch.int32, device=device)
    return all(
        is_right(
            partial(packed_product.multiply, block_m=HOPPER_BLOCK_M),
            2 * HOPPER_BLOCK_M - 5,
            weight,
            unpack_in_torch(*weight, IN_FEATURES, GROUP),
            dtype,
            counters,
            generator,
        )
        for weight in weights(bits, device, generator)
    )


def is_right(
    multiply: Callable[..., Tensor],
    rows: int,
    weight: Weight,
    dense: Tensor,
    dtype: torch.dtype,
    counters: Tensor,
    generator: torch.Generator,
) -> bool:
    x = torch.randn(rows, IN_FEATURES, generator=generator, device=counters.device).to(dtype)
    y = multiply(x, *weight, GROUP, tile_counters=counters, num_sms=NUM_SMS)
    expected = F.linear(x.float(), dense)
    return bool((y.float() - expected).norm() < 0.02 * expected.norm())
