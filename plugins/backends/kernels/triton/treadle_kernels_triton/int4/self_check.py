"""Whether the kernels are right on this device, which nothing but a trial can tell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treadle_kernels_triton.hopper import packed_product
from treadle_kernels_triton.int4 import kernel
from treadle_kernels_triton.int4.tiles import choose_tile
from treadle_layers_kit.int4_layout import CHUNK, pack_codes, pack_steps
from treadle_triton_kit.self_check import checked_once, self_check

__all__ = ("kernel_works",)

log = logging.getLogger(__name__)

OUT_FEATURES = 192
"""No multiple of a tile's."""
SMALL_M_ROWS = (3, 12, 20)
"""Rows: one for each tile that is used beside Hopper's kernel, then for each of the others."""
LARGE_M_ROWS = (40, 100, 200)
FAILED = {
    "hopper": "no kernel of Hopper's for four-bit weights here (%s): Triton's serves them",
    "triton": "no kernel multiplies by four-bit weights here (%s): they are unpacked first",
    "unpack": "no kernel unpacks four-bit weights here (%s): torch does",
}

Product = Callable[[Tensor], Tensor]


@checked_once
def kernel_works(path: str, dtype: torch.dtype, group_size: int = 2 * CHUNK) -> bool:
    """For ``path``: ``hopper``, ``triton``, ``triton with hopper`` or ``unpack``. Tried once on the device that is
    current; if it fails, the log says so."""

    def check() -> bool:
        device = torch.device("cuda", torch.cuda.current_device())
        return check_path(path, dtype, group_size, device)

    return self_check(check, log, FAILED[path.partition(" ")[0]])


def check_path(path: str, dtype: torch.dtype, group_size: int, device: torch.device) -> bool:
    """Whether all results are those of the plain product."""
    generator = torch.Generator(device).manual_seed(0)
    in_features = 4 * CHUNK
    codes = torch.randint(16, (in_features, OUT_FEATURES), generator=generator, device=device)
    shape = (in_features // group_size, OUT_FEATURES)
    scales = torch.rand(shape, generator=generator, device=device).half()
    zeros = torch.randint(16, shape, generator=generator, device=device)
    packed_codes, scales_and_zeros = pack_codes(codes), pack_steps(scales, zeros, dtype)
    zeros, scales = (tensor.repeat_interleave(group_size, 0) for tensor in (zeros, scales.float()))
    weight = (codes - zeros) * scales
    for rows, product in _products(path, packed_codes, scales_and_zeros, group_size, dtype):
        x = torch.randn(rows, in_features, generator=generator, device=device).to(dtype)
        expected = x.float() @ weight
        if not (product(x).float() - expected).norm() < 0.02 * expected.norm():
            return False
    return True


def _products(
    path: str, codes: Tensor, scales_and_zeros: Tensor, group_size: int, dtype: torch.dtype
) -> Iterator[tuple[int, Product]]:
    """Rows, and what to multiply as many by."""
    if path == "unpack":
        weight = kernel.unpack(codes, scales_and_zeros, len(codes) * CHUNK, group_size, dtype)
        yield 3, lambda x: x @ weight.t()
        return
    max_sms = 132  # multiprocessors, which share tiles; one takes them whole
    tile_counters = torch.zeros(4 * max_sms, dtype=torch.int32, device=codes.device)
    arguments: dict[str, Any] = {
        "codes": codes,
        "scales_and_zeros": scales_and_zeros,
        "group_size": group_size,
        "tile_counters": tile_counters,
    }
    if path == "hopper":
        for block_m in packed_product.BLOCKS:
            for num_sms in (1, max_sms):
                multiply = packed_product.multiply_int4
                product = partial(multiply, **arguments, block_m=block_m, num_sms=num_sms)
                yield 2 * block_m - 5, product
        return
    for rows in SMALL_M_ROWS if path == "triton with hopper" else (*SMALL_M_ROWS, *LARGE_M_ROWS):
        tile = choose_tile(rows, OUT_FEATURES)
        if tile is not None:
            yield rows, partial(kernel.multiply, **arguments, tile=tile, num_sms=max_sms)
