"""The host's side of decode batches: how a product is divided and where that is faster, a trial."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle_kernels_triton.join import reduce_split_k
from treadle_triton_kit.self_check import self_check
from treadle_triton_kit.tma import is_tma_readable, tensor_descriptor

__all__ = (
    "MOST_ROWS",
    "SmallBatchLinear",
    "TileConfig",
    "choose_batch",
    "choose_gated_batch",
    "create_small_batch_linear",
)

log = logging.getLogger(__name__)

MOST_ROWS = 256
LEAST = 1024
"""Features, and depth, of the smallest weight that was measured."""
LARGEST = 1 << 27
"""Elements of a weight from which cuBLAS is at the card's bandwidth: output heads."""
_TILE = 64  # features of a warp group, rows of a box, columns of a step


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile has 64 · ``groups`` rows of the weight and ``rows`` of ``x``; ``splits`` programs share its
    depth. Of a ``gated`` one half the rows of the weight are the gate's, and its depth is not shared."""

    groups: int
    rows: int
    splits: int = 1
    gated: bool = False

    @property
    def stages(self) -> int:
        """Steps on their way. Four at least; no more than leave room for the programs of the kernel
        ahead, or this one would not start early."""
        step = (_TILE * self.groups + self.rows) * _TILE * 2
        return min(10, max(4, (201 << 10) // step))

    @property
    def max_rows(self) -> int:
        """Rows that one instruction multiplies, a power of two. With three groups no more than 128: it may
        have no more registers than a thread has on average."""
        return 128 if self.rows == 192 or (self.groups == 3 and self.rows > 128) else self.rows

    @property
    def piece(self) -> int:
        """Rows that are written at once, for which results have one descriptor."""
        return self.rows - self.max_rows or self.max_rows

    def programs(self, rows: int, features: int) -> int:
        """For ``x [rows, ..]`` and a weight ``[features, ..]``."""
        return _over(features, _TILE * self.groups) * _over(rows, self.rows) * self.splits


Choice = Callable[[int, int, int, int], TileConfig | None]
"""Of rows, features, depth and multiprocessors; ``None``: use torch."""


def _over(count: int, size: int) -> int:
    return -(-count // size)


def choose_batch(rows: int, features: int, depth: int, processors: int) -> TileConfig | None:
    """For ``x [rows, depth]`` and a weight ``[features, depth]``.

    As times the speed of what else there is (cuBLAS with a bias of zeros or without), in graphs over cold
    weights on one H200 (132 multiprocessors, torch 2.11, Triton 3.6). Narrow weights in parts, with the
    norm that adds them up: 1.2 to 1.7 for 1024 x 2048 and 1024 x 3072 at 8 to 256 rows; eight shares of
    the depth are slower than four. 4096 x 1024: 1.0 to 1.2 to 64 rows, 1.04 to 1.16 beyond. 4096 x 2048:
    1.0 to 64 rows, 1.03 to 1.12 to 128, 0.99 at 160, 1.09 to 1.15 beyond. 3072 x 4096: 1.16 at 192, 1.05
    at 256, else slower from 48 rows on. 6144 x 4096: 1.01 to 1.09 to 64 rows, 1.15 and 1.07 at 224 and 240,
    for which cuBLAS chooses badly, as for 176 (25.6 us there; the kernel 22.6 at 160 and 22.9 at 192, another
    card), else slower. In parts 4096 x 4096: 1.0 to 1.07 to 64 rows, beyond slower; 4096 x 12288: 1.0 to 1.04
    to 64 rows, 1.13 and 1.08 at 224 and 240, and 1.02 at 192 and 256, where whole steps were slower with it.
    """
    small, large = min(features, depth) < LEAST, features * depth > LARGEST
    tiles = _over(features, _TILE)
    if not 2 <= rows <= MOST_ROWS or small or large or features % 8 or tiles > processors:
        return None
    narrow = features <= 2048 <= depth
    if rows <= 64:
        splits = 2 if depth >= 4096 and 2 * tiles <= processors else 1
        return TileConfig(1, 64, min(4, processors // tiles) if narrow else splits)
    down = _over(rows, 128)
    found = None
    if narrow:
        splits = min(4, processors // (tiles * down))
        found = TileConfig(1, 128, splits) if splits > 1 else None
    elif depth <= 2048:
        found = TileConfig(1, 64 if rows <= 128 else 128)
    elif features > 4096 and (161 <= rows <= 176 or 209 <= rows <= 240):
        found = TileConfig(2, 128)
    elif features <= 4096 and depth >= 8192 and 209 <= rows <= 240:
        found = TileConfig(2, 256, 4)
    elif features <= 3072 and depth <= 4096 and (177 <= rows <= 192 or rows > 240):
        found = TileConfig(1, 128)
    return found if found and found.programs(rows, features) <= processors else None


def choose_gated_batch(rows: int, features: int, depth: int, processors: int) -> TileConfig | None:
    """The same for ``linear_silu_and_mul``; ``features`` are those of both halves, and for few of them most of the
    multiprocessors would have nothing to do.

    6144 x 1024: 1.04 to 1.07 to 64 rows, 1.13 to 1.17 to 192, 1.11 to 1.20 beyond. 24576 x 4096: 1.01 to
    1.06 to 64 rows, 1.06 to 1.08 to 128, 1.02 to 1.04 to 192, 1.05 from 224 on, slower at 208. 12288 x 4096:
    1.0 to 160 rows, 1.30 at 192, for which cuBLAS chooses badly, 1.00 to 1.03 from 224 on, slower at 208.
    """
    tiles = _over(features, _TILE)
    groups = _over(tiles, processors)
    small = min(features, depth) < LEAST or 3 * tiles < processors
    if not 2 <= rows <= MOST_ROWS or small or features % 16 or groups > 3:
        return None
    if rows <= 192:
        found = TileConfig(groups, _over(rows, 64) * 64, gated=True)
    elif groups == 1:
        found = TileConfig(2, 128, gated=True)
    elif rows > 208:
        found = TileConfig(3, 256 if groups == 3 else 128, gated=True)
    else:
        return None
    return found if found.programs(rows, features) <= processors else None


class SmallBatchLinear:
    """Multiplies rows of ``dtype`` by weights; see ``batch_kernel``. Uses only what ``usable`` has.

    To be captured: a launch, with four descriptors, takes the host 60 us more than torch's linear (13), and
    steps of few rows that are not captured wait for the host.
    """

    def __init__(
        self, dtype: torch.dtype, num_sms: int, choice: Choice, usable: Iterable[TileConfig]
    ) -> None:
        self.dtype = dtype
        self.num_sms = num_sms
        self._choice = choice
        self._usable = frozenset(usable)
        self.splits = sorted({division.splits for division in self._usable} - {1})
        """How many parts there may be."""

    def division(self, x: Tensor, weight: Tensor) -> TileConfig | None:
        """For ``x [rows, depth]`` and ``weight [features, depth]``; ``None``: use torch."""
        if not torch.cuda.is_current_stream_capturing():
            return None
        (rows, depth), features = x.shape, len(weight)
        found = self._choice(rows, features, depth, self.num_sms)
        served = is_tma_readable(x, self.dtype) and is_tma_readable(weight, self.dtype)
        return found if found in self._usable and served and weight.is_contiguous() else None

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, division: TileConfig
    ) -> Tensor:
        """``[rows, features]`` in the dtype of ``x``; ``silu`` of the first half of them times the second,
        if ``division`` is gated; if it splits the depth, float32 ``[splits, rows, features]``, the sum of
        which it is. Only what is neither has a bias."""
        # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
        from treadle_kernels_triton.hopper.batch_kernel import REGISTERS, WARPS, batch_kernel

        (rows, depth), features = x.shape, len(weight)
        parts, rest = division.splits > 1, tensor_descriptor(x, (16, _TILE))
        if parts:
            shape = (division.splits, rows, features)
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
            results = rest  # not used
        else:
            width = features // 2 if division.gated else features
            out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
            results = tensor_descriptor(out, (division.piece, 32 if division.gated else _TILE))
        batch_kernel[(division.programs(rows, features),)](
            tensor_descriptor(x, (_TILE, _TILE)), rest, _boxes_of(weight, division.gated), results,
            x if bias is None else bias, out,
            rows, features, _over(rows, division.rows), _over(depth, _TILE), division.splits,
            int(bias is not None),
            GROUPS=division.groups, ROWS=division.rows, MOST=division.max_rows, STAGES=division.stages,
            GATED=division.gated, PARTS=parts,
            num_warps=WARPS, maxnreg=REGISTERS[division.groups - 1], launch_pdl=True,
        )  # fmt: skip
        return out


def _boxes_of(weight: Tensor, gated: bool) -> object:
    """64 rows of a weight; if ``gated``, eight of its first half, eight of its second, and so on."""
    if not gated:
        return tensor_descriptor(weight, (_TILE, _TILE))
    features, depth = weight.shape
    half = features // 2
    eights = weight.as_strided((half // 8, 2, 8, depth), (8 * depth, half * depth, depth, 1))
    return tensor_descriptor(eights, (4, 2, 8, _TILE))


def create_small_batch_linear(
    dtype: str, features: int, depth: int, choice: Choice
) -> SmallBatchLinear | None:
    """For one weight, on devices where the kernel works, which nothing but a trial can tell.

    The trials also compile it for every division that is chosen, so that no captured call has to.
    """
    if dtype not in ("bfloat16", "float16") or not _works(dtype):
        return None
    kind = getattr(torch, dtype)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    found = {choice(rows, features, depth, processors) for rows in range(1, MOST_ROWS + 1)}
    usable = [division for division in found if division and _passes(kind, division)]
    return SmallBatchLinear(kind, processors, choice, usable) if usable else None


@cache
def _works(dtype: str) -> bool:
    """Once for a process: where it does not work at all, one warning is enough."""
    return _passes(getattr(torch, dtype), TileConfig(1, 64))


def _passes(dtype: torch.dtype, division: TileConfig) -> bool:
    warning = "no products of decode batches on Hopper here (%s): torch's linear serves"
    return self_check(lambda: _self_check(dtype, division), log, warning)


def _self_check(dtype: torch.dtype, division: TileConfig) -> bool:
    """Several tiles both ways, with parts of tiles at the end of rows, features and depth."""
    made = torch.Generator("cuda").manual_seed(0)
    rows, width, depth = division.rows + 37, 64 * division.groups + 40, 64 * division.splits + 200
    features = 2 * width if division.gated else width

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device="cuda").to(dtype)

    x, weight, bias = random(rows, depth), random(features, depth) * depth**-0.5, random(features)
    plain = division.splits == 1 and not division.gated
    batches = SmallBatchLinear(dtype, 1, choose_batch, ())
    for given in (None, bias) if plain else (None,):
        want = F.linear(x.float(), weight.float(), None if given is None else given.float())
        if division.gated:
            first, second = want.chunk(2, 1)
            want = F.silu(first) * second
        got = batches.multiply(x, weight, given, division)
        if division.splits > 1:  # which compiles what adds them, too
            got = reduce_split_k(got, None, dtype, early=True)
        if not bool((got.float() - want).norm() < 0.02 * want.norm()):
            return False
    return True
