"""The host's side: for which products the kernel is the faster one, the launch, a trial."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle_triton_kit.self_check import self_check
from treadle_triton_kit.tma import is_tma_readable, tensor_descriptor

__all__ = ("DEFERRED", "TURNS", "GatedLinear", "Variant", "choose_gated", "create_gated_linear")

log = logging.getLogger(__name__)

LEAST_ROWS = 1024
"""Of fewer rows, up to a half of the last tile may be nobody's: 300 rows took 1.5 times as long."""
LEAST_DEPTH = 128
"""Two steps: ``DEFERRED`` has as many in flight while it writes."""
LEAST_ROUNDS = 2.75
"""Little less than the fewest at which the kernel was faster; see ``choose_gated``."""
MANY_ROUNDS = 16
DEEP = 2048
"""From both of these on writing is deferred; between what was measured on either side."""
_ROWS = 128  # of a tile


@dataclass(frozen=True, slots=True)
class Variant:
    """How the kernel hides the writing of results; see ``kernel``.

    A tile has ``columns`` of the result, its steps ``stages`` places in shared memory, and results
    leave by way of ``buffers`` for each warp group.
    """

    turns: bool
    columns: int
    stages: int
    buffers: int

    def tiles(self, rows: int, width: int) -> tuple[int, int]:
        """How many tiles a result ``[rows, width]`` has along both."""
        return -(-rows // _ROWS), -(-width // self.columns)


TURNS = Variant(True, 64, 6, 1)
DEFERRED = Variant(False, 128, 4, 2)


def choose_gated(rows: int, width: int, depth: int, processors: int) -> Variant | None:
    """For ``x [rows, depth]`` and a weight ``[2 * width, depth]``; ``None``: use torch.

    Rounds are tiles for each multiprocessor; with few of them the last, in which some programs have no
    tile, weighs more, and so do a program's first fetch and last write. As times the speed of torch's
    linear and ``silu_and_mul`` on an H200 (132 multiprocessors, torch 2.11, Triton 3.6), in bursts and where
    the card's power is the limit:

    * ``TURNS``: 1.16 and 1.10 for Qwen3-0.6B at 1,024 rows (2.9 rounds), 1.24 and 1.20 at 8,192; 1.06 and
      1.02 for 8B at 1,024. Not used at 8B's 256 and 512 rows: 1.02 and 1.00.
    * ``DEFERRED``: 1.05 for 8B at 2,048 rows, 1.07 and 1.03 at 8,192. At a depth of 1,024, where there are
      four times as many results for each step, it is slower than ``TURNS``.
    """
    if rows < LEAST_ROWS or depth < LEAST_DEPTH or width % 8 or depth % 8:
        return None
    m_tiles, n_tiles = TURNS.tiles(rows, width)
    rounds = m_tiles * n_tiles / processors
    if rounds < LEAST_ROUNDS:
        return None
    return DEFERRED if rounds >= MANY_ROUNDS and depth >= DEEP else TURNS


class GatedLinear:
    """Multiplies and gates what ``dtype`` says, with a program for each of the multiprocessors."""

    def __init__(self, dtype: torch.dtype, num_sms: int) -> None:
        self.dtype = dtype
        self.num_sms = num_sms

    def product(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """``linear_silu_and_mul`` without a bias, or ``None`` where torch's operations are to be used."""
        depth = x.shape[-1]
        rows, width = x.numel() // depth, weight.shape[0] // 2
        variant = choose_gated(rows, width, depth, self.num_sms)
        if variant is None or not is_tma_readable(weight, self.dtype) or not weight.is_contiguous():
            return None
        flat = x.reshape(rows, depth)
        if not is_tma_readable(flat, self.dtype):
            return None
        return self.forward(flat, weight, variant).view(*x.shape[:-1], width)

    def forward(self, x: Tensor, weight: Tensor, variant: Variant) -> Tensor:
        """``x [rows, depth]``, ``weight [2 * width, depth]``; ``[rows, width]``.

        Of both the rows are multiples of 16 bytes apart, and so they are aligned; ``weight`` is
        contiguous. The trial has compiled it and nothing is kept for later calls: graphs may capture it.
        """
        # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
        from treadle_kernels_triton.hopper.kernel import REGISTERS, WARPS, gated_kernel

        (rows, depth), width = x.shape, weight.shape[0] // 2
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        m_tiles, n_tiles = variant.tiles(rows, width)
        gated_kernel[(min(m_tiles * n_tiles, self.num_sms),)](
            tensor_descriptor(x, (_ROWS, 64)), tensor_descriptor(weight, (variant.columns, 64)),
            tensor_descriptor(out, (_ROWS if variant.turns else _ROWS // 2, 64)),
            m_tiles, n_tiles, -(-depth // 64), width,
            TURNS=variant.turns, COLUMNS=variant.columns, STAGES=variant.stages,
            BUFFERS=variant.buffers, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
        return out


def create_gated_linear(dtype: str) -> GatedLinear | None:
    """For devices where the kernel works, which nothing but a trial can tell.

    The trial also compiles it, so that no captured call has to.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    kind = getattr(torch, dtype)
    warning = "no gated product of Hopper's here (%s): torch's linear serves"
    if not self_check(
        lambda: all(_self_check(GatedLinear(kind, 2), v) for v in (TURNS, DEFERRED)), log, warning
    ):
        return None
    return GatedLinear(kind, torch.cuda.get_device_properties("cuda").multi_processor_count)


def _self_check(gated: GatedLinear, variant: Variant) -> bool:
    """Several tiles for each of two programs, with parts of tiles at the end of rows and columns."""
    made = torch.Generator("cuda").manual_seed(0)
    rows, width, depth = 300, 264, 200

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device="cuda").to(gated.dtype)

    x, weight = random(rows, depth), random(2 * width, depth) * depth**-0.5
    first, second = F.linear(x.float(), weight.float()).chunk(2, 1)
    want = F.silu(first) * second
    got = gated.forward(x, weight, variant).float()
    return bool((got - want).norm() < 0.02 * want.norm())
