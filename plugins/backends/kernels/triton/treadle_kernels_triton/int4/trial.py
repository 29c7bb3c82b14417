"""Whether the kernels are right on this device, which nothing but a trial can tell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from treadle_kernels_triton.int4 import hopper, kernel
from treadle_kernels_triton.int4.tiles import WIDES, choose
from treadle_layers_kit.int4_layout import CHUNK, pack_codes, pack_steps
from treadle_triton_kit.self_check import self_check

__all__ = ("works",)

log = logging.getLogger(__name__)

OUTPUTS = 192
"""No multiple of a tile's."""
FEW = (3, 12, 20)
"""Rows: one for each tile that is used beside Hopper's kernel, then for each of the others."""
MORE = (40, 100, 200)
FAILED = {
    "wide": "no kernel of Hopper's for four-bit weights here (%s): Triton's serves them",
    "few": "no kernel multiplies by four-bit weights here (%s): they are unpacked first",
    "unpack": "no kernel unpacks four-bit weights here (%s): torch does",
}

Product = Callable[[Tensor], Tensor]


@cache
def works(path: str, dtype: torch.dtype, group: int = 2 * CHUNK) -> bool:
    """For ``path``: ``wide``, ``few``, ``few with wide`` or ``unpack``. Tried once on the device that is
    current; if it fails, the log says so."""

    def trial() -> bool:
        device = torch.device("cuda", torch.cuda.current_device())
        return tried(path, dtype, group, device)

    return self_check(trial, log, FAILED[path.partition(" ")[0]])


def tried(path: str, dtype: torch.dtype, group: int, device: torch.device) -> bool:
    """Whether all results are those of the plain product."""
    made = torch.Generator(device).manual_seed(0)
    inputs = 4 * CHUNK
    codes = torch.randint(16, (inputs, OUTPUTS), generator=made, device=device)
    shape = (inputs // group, OUTPUTS)
    scales = torch.rand(shape, generator=made, device=device).half()
    zeros = torch.randint(16, shape, generator=made, device=device)
    packed, steps = pack_codes(codes), pack_steps(scales, zeros, dtype)
    zeros, scales = (each.repeat_interleave(group, 0) for each in (zeros, scales.float()))
    weight = (codes - zeros) * scales
    for rows, product in _products(path, packed, steps, group, dtype):
        x = torch.randn(rows, inputs, generator=made, device=device).to(dtype)
        want = x.float() @ weight
        if not (product(x).float() - want).norm() < 0.02 * want.norm():
            return False
    return True


def _products(
    path: str, codes: Tensor, steps: Tensor, group: int, dtype: torch.dtype
) -> Iterator[tuple[int, Product]]:
    """Rows, and what to multiply as many by."""
    if path == "unpack":
        weight = kernel.unpack(codes, steps, len(codes) * CHUNK, group, dtype)
        yield 3, lambda x: x @ weight.t()
        return
    many = 132  # multiprocessors, which share tiles; one takes them whole
    tickets = torch.zeros(4 * many, dtype=torch.int32, device=codes.device)
    given: dict[str, Any] = {"codes": codes, "steps": steps, "group": group, "tickets": tickets}
    if path == "wide":
        for wide in WIDES:
            for processors in (1, many):
                product = partial(hopper.multiply, **given, tile=wide, processors=processors)
                yield 2 * wide.rows - 5, product
        return
    for rows in FEW if path == "few with wide" else (*FEW, *MORE):
        tile = choose(rows, OUTPUTS)
        if tile is not None:
            yield rows, partial(kernel.multiply, **given, tile=tile, processors=many)
