"""The host's side: for which products the kernel is the faster one, the launch, a trial."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle_triton_kit.self_check import self_check
from treadle_triton_kit.tma import is_tma_readable, tensor_descriptor

__all__ = (
    "COOPERATIVE",
    "PINGPONG",
    "GatedLinear",
    "Variant",
    "choose_variant",
    "create_gated_linear",
)

log = logging.getLogger(__name__)

MIN_ROWS = 1024
"""Of fewer rows, up to a half of the last tile may be nobody's: 300 rows took 1.5 times as long."""
MIN_IN_FEATURES = 128
"""Two steps: ``COOPERATIVE`` has as many in flight while it writes."""
MIN_WAVES = 2.75
"""Little less than the fewest at which the kernel was faster; see ``choose_variant``."""
COOPERATIVE_MIN_WAVES = 16
COOPERATIVE_MIN_IN_FEATURES = 2048
"""From both of these on ``COOPERATIVE`` is chosen; between what was measured on either side."""
_BLOCK_M = 128  # of a tile


@dataclass(frozen=True, slots=True)
class Variant:
    """How the kernel hides the writing of results; see ``gated_kernel``.

    A tile has ``block_n`` columns of the result, its steps ``num_stages`` places in shared memory, and results
    leave by way of ``num_buffers`` buffers for each warp group.
    """

    pingpong: bool
    block_n: int
    num_stages: int
    num_buffers: int

    def num_tiles(self, rows: int, out_features: int) -> tuple[int, int]:
        """How many tiles a result ``[rows, out_features]`` has along both."""
        return -(-rows // _BLOCK_M), -(-out_features // self.block_n)


PINGPONG = Variant(True, 64, 6, 1)
COOPERATIVE = Variant(False, 128, 4, 2)


def choose_variant(rows: int, out_features: int, in_features: int, num_sms: int) -> Variant | None:
    """For ``x [rows, in_features]`` and a weight ``[2 * out_features, in_features]``; ``None``: use torch.

    Rounds are tiles for each multiprocessor; with few of them the last, in which some programs have no
    tile, weighs more, and so do a program's first fetch and last write. As times the speed of torch's
    linear and ``silu_and_mul`` on an H200 (132 multiprocessors, torch 2.11, Triton 3.6), in bursts and where
    the card's power is the limit:

    * ``PINGPONG``: 1.16 and 1.10 for Qwen3-0.6B at 1,024 rows (2.9 rounds), 1.24 and 1.20 at 8,192; 1.06 and
      1.02 for 8B at 1,024. Not used at 8B's 256 and 512 rows: 1.02 and 1.00.
    * ``COOPERATIVE``: 1.05 for 8B at 2,048 rows, 1.07 and 1.03 at 8,192. At a depth of 1,024, where there are
      four times as many results for each step, it is slower than ``PINGPONG``.
    """
    if rows < MIN_ROWS or in_features < MIN_IN_FEATURES or out_features % 8 or in_features % 8:
        return None
    m_tiles, n_tiles = PINGPONG.num_tiles(rows, out_features)
    num_waves = m_tiles * n_tiles / num_sms
    if num_waves < MIN_WAVES:
        return None
    return (
        COOPERATIVE
        if num_waves >= COOPERATIVE_MIN_WAVES and in_features >= COOPERATIVE_MIN_IN_FEATURES
        else PINGPONG
    )


class GatedLinear:
    """Multiplies and gates what ``dtype`` says, with a program for each of the multiprocessors."""

    def __init__(self, dtype: torch.dtype, num_sms: int) -> None:
        self.dtype = dtype
        self.num_sms = num_sms

    def try_forward(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """``linear_silu_and_mul`` without a bias, or ``None`` where torch's operations are to be used."""
        in_features = x.shape[-1]
        rows, out_features = x.numel() // in_features, weight.shape[0] // 2
        variant = choose_variant(rows, out_features, in_features, self.num_sms)
        if variant is None or not is_tma_readable(weight, self.dtype) or not weight.is_contiguous():
            return None
        x_2d = x.reshape(rows, in_features)
        if not is_tma_readable(x_2d, self.dtype):
            return None
        return self.forward(x_2d, weight, variant).view(*x.shape[:-1], out_features)

    def forward(self, x: Tensor, weight: Tensor, variant: Variant) -> Tensor:
        """``x [rows, in_features]``, ``weight [2 * out_features, in_features]``; ``[rows, out_features]``.

        Of both the rows are multiples of 16 bytes apart, and so they are aligned; ``weight`` is
        contiguous. The trial has compiled it and nothing is kept for later calls: graphs may capture it.
        """
        # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
        from treadle_kernels_triton.hopper.gated_kernel import REGISTERS, WARPS, gated_kernel

        (rows, in_features), out_features = x.shape, weight.shape[0] // 2
        out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
        m_tiles, n_tiles = variant.num_tiles(rows, out_features)
        gated_kernel[(min(m_tiles * n_tiles, self.num_sms),)](
            tensor_descriptor(x, (_BLOCK_M, 64)), tensor_descriptor(weight, (variant.block_n, 64)),
            tensor_descriptor(out, (_BLOCK_M if variant.pingpong else _BLOCK_M // 2, 64)),
            m_tiles, n_tiles, -(-in_features // 64), out_features,
            PINGPONG=variant.pingpong, BLOCK_N=variant.block_n, NUM_STAGES=variant.num_stages,
            NUM_BUFFERS=variant.num_buffers, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
        return out


def create_gated_linear(dtype: str) -> GatedLinear | None:
    """For devices where the kernel works, which nothing but a trial can tell.

    The trial also compiles it, so that no captured call has to.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    torch_dtype = getattr(torch, dtype)
    warning = "no gated product of Hopper's here (%s): torch's linear serves"
    if not self_check(
        lambda: all([_self_check(GatedLinear(torch_dtype, 2), v) for v in (PINGPONG, COOPERATIVE)]),
        log,
        warning,
    ):
        return None
    return GatedLinear(torch_dtype, torch.cuda.get_device_properties("cuda").multi_processor_count)


def _self_check(gated_linear: GatedLinear, variant: Variant) -> bool:
    """Several tiles for each of two programs, with parts of tiles at the end of rows and columns."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, out_features, in_features = 300, 264, 200

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(gated_linear.dtype)

    x, weight = random(rows, in_features), random(2 * out_features, in_features) * in_features**-0.5
    gate, up = F.linear(x.float(), weight.float()).chunk(2, 1)
    expected = F.silu(gate) * up
    actual = gated_linear.forward(x, weight, variant).float()
    return bool((actual - expected).norm() < 0.02 * expected.norm())
