"""The host's side of decode batches: how a product is divided and where that is faster, a trial."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.layers.trial import passes
from weft_kernels_triton.hopper.tensors import boxes, fetchable
from weft_kernels_triton.join import join

__all__ = ("MOST_ROWS", "Batches", "Division", "choose_batch", "choose_gated_batch", "find_batches")

log = logging.getLogger(__name__)

MOST_ROWS = 256
LEAST = 1024
"""Features, and depth, of the smallest weight that was measured."""
LARGEST = 1 << 27
"""Elements of a weight from which cuBLAS is at the card's bandwidth: output heads."""
_TILE = 64  # features of a warp group, rows of a box, columns of a step


@dataclass(frozen=True, slots=True)
class Division:
    """A tile has 64 · ``groups`` rows of the weight and ``rows`` of ``x``; ``splits`` programs share its
    depth."""

    groups: int
    rows: int
    splits: int = 1

    @property
    def stages(self) -> int:
        """Steps on their way. Four at least; no more than leave room for the programs of the kernel
        ahead, or this one would not start early."""
        step = (_TILE * self.groups + self.rows) * _TILE * 2
        return min(10, max(4, (201 << 10) // step))

    @property
    def piece(self) -> int:
        """Rows that are written at once, for which results have one descriptor."""
        if self.rows == 192:
            return 64
        return 128 if self.groups == 3 and self.rows > 128 else self.rows

    def programs(self, rows: int, features: int) -> int:
        """For ``x [rows, ..]`` and a weight ``[features, ..]``."""
        return _over(features, _TILE * self.groups) * _over(rows, self.rows) * self.splits


Choice = Callable[[int, int, int, int], Division | None]
"""Of rows, features, depth and multiprocessors; ``None``: use torch."""


def _over(count: int, size: int) -> int:
    return -(-count // size)


def choose_batch(rows: int, features: int, depth: int, processors: int) -> Division | None:
    """For ``x [rows, depth]`` and a weight ``[features, depth]``.

    As times the speed of what else there is (cuBLAS with a bias of zeros or without), in graphs over cold
    weights on one H200 (132 multiprocessors, torch 2.11, Triton 3.6). Narrow weights in parts, with the
    norm that adds them up: 1.2 to 1.7 for 1024 x 2048 and 1024 x 3072 at 8 to 256 rows; eight shares of
    the depth are slower than four. 4096 x 1024: 1.0 to 1.2 to 64 rows, 1.04 to 1.16 beyond. 6144 x 4096:
    1.01 to 1.09 to 64 rows, 1.1 at 176, 1.15 and 1.07 at 224 and 240, for which cuBLAS chooses badly, else
    slower. In parts 4096 x 4096: 1.0 to 1.07 to 64 rows, beyond slower; 4096 x 12288: 1.0 to 1.04 to 64
    rows, 1.13 and 1.08 at 224 and 240, and 1.02 at 192 and 256, where whole steps were slower with it.
    """
    small, large = min(features, depth) < LEAST, features * depth > LARGEST
    tiles = _over(features, _TILE)
    if not 2 <= rows <= MOST_ROWS or small or large or features % 8 or tiles > processors:
        return None
    narrow = features <= 2048 <= depth
    if rows <= 64:
        splits = 2 if depth >= 4096 and 2 * tiles <= processors else 1
        return Division(1, 64, min(4, processors // tiles) if narrow else splits)
    down = _over(rows, 128)
    found = None
    if narrow:
        splits = min(4, processors // (tiles * down))
        found = Division(1, 128, splits) if splits > 1 else None
    elif depth <= 1024:
        found = Division(1, 64 if rows <= 128 else 128)
    elif features > 4096 and (161 <= rows <= 176 or 209 <= rows <= 240):
        found = Division(2, 128)
    elif features <= 4096 and depth >= 8192 and 209 <= rows <= 240:
        found = Division(2, 256, 4)
    return found if found and found.programs(rows, features) <= processors else None


def choose_gated_batch(rows: int, features: int, depth: int, processors: int) -> Division | None:
    """The same for ``silu_linear``; ``features`` are those of both halves, and for few of them most of the
    multiprocessors would have nothing to do.

    6144 x 1024: 1.04 to 1.07 to 64 rows, 1.13 to 1.17 to 192, 1.11 to 1.20 beyond. 24576 x 4096: 1.01 to
    1.06 to 64 rows, 1.06 to 1.08 to 128, 1.02 to 1.04 to 192, 1.05 from 224 on, slower at 208. Two warp
    groups, as for 12288 features, have been tried for right results only, and serve up to 128 rows.
    """
    tiles = _over(features, _TILE)
    groups = _over(tiles, processors)
    small = min(features, depth) < LEAST or 3 * tiles < processors
    if not 2 <= rows <= MOST_ROWS or small or features % 16 or groups > 3:
        return None
    if rows <= 128 or (rows <= 192 and groups != 2):
        found = Division(groups, _over(rows, 64) * 64)
    elif groups == 1:
        found = Division(2, 128)
    elif groups == 3 and rows > 208:
        found = Division(3, 256)
    else:
        return None
    return found if found.programs(rows, features) <= processors else None


class Batches:
    """Multiplies rows of ``dtype`` by weights; see ``batch_kernel``. Uses only what ``usable`` has.

    To be captured: a launch, with four descriptors, takes the host 60 us where torch's linear takes 13,
    and steps of few rows that are not captured wait for the host.
    """

    def __init__(
        self, dtype: torch.dtype, processors: int, choice: Choice, usable: Iterable[Division]
    ) -> None:
        self.dtype = dtype
        self.processors = processors
        self._choice = choice
        self._usable = frozenset(usable)
        self.splits = sorted({division.splits for division in self._usable} - {1})
        """How many parts there may be."""

    def division(self, x: Tensor, weight: Tensor) -> Division | None:
        """For ``x [rows, depth]`` and ``weight [features, depth]``; ``None``: use torch."""
        if not torch.cuda.is_current_stream_capturing():
            return None
        (rows, depth), features = x.shape, len(weight)
        found = self._choice(rows, features, depth, self.processors)
        served = fetchable(x, self.dtype) and fetchable(weight, self.dtype)
        return found if found in self._usable and served and weight.is_contiguous() else None

    def whole(self, x: Tensor, weight: Tensor, bias: Tensor | None, division: Division) -> Tensor:
        """``[rows, features]`` in the dtype of ``x``; the depth is not shared."""
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
        self._launch(x, weight, boxes(weight, (_TILE, _TILE)), out, division, bias=bias)
        return out

    def gated(self, x: Tensor, weight: Tensor, division: Division) -> Tensor:
        """``silu`` of the first half of the features, times the second: ``[rows, features / 2]``."""
        features, depth = weight.shape
        width = features // 2
        eights = weight.as_strided((width // 8, 2, 8, depth), (8 * depth, width * depth, depth, 1))
        out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
        self._launch(x, weight, boxes(eights, (4, 2, 8, _TILE)), out, division, gated=True)
        return out

    def parts(self, x: Tensor, weight: Tensor, division: Division) -> Tensor:
        """float32 ``[splits, rows, features]``, the sum of which is ``whole``."""
        shape = (division.splits, len(x), len(weight))
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._launch(x, weight, boxes(weight, (_TILE, _TILE)), out, division)
        return out

    def _launch(
        self,
        x: Tensor,
        weight: Tensor,
        weights: object,
        out: Tensor,
        division: Division,
        *,
        bias: Tensor | None = None,
        gated: bool = False,
    ) -> None:
        # Here, for Gluon is an experiment of Triton's: it may be gone, and that hurts nobody else.
        from weft_kernels_triton.hopper.batch_kernel import REGISTERS, WARPS, batch_kernel

        rows, depth = x.shape
        rest = boxes(x, (16, _TILE))
        parts = out.dim() == 3
        results = rest if parts else boxes(out, (division.piece, 32 if gated else _TILE))
        batch_kernel[(division.programs(rows, len(weight)),)](
            boxes(x, (_TILE, _TILE)), rest, weights, results, x if bias is None else bias, out,
            rows, len(weight), _over(rows, division.rows), _over(depth, _TILE), division.splits,
            int(bias is not None),
            GROUPS=division.groups, ROWS=division.rows, STAGES=division.stages,
            GATED=gated, PARTS=parts,
            num_warps=WARPS, maxnreg=REGISTERS[division.groups - 1], launch_pdl=True,
        )  # fmt: skip


def find_batches(dtype: str, features: int, depth: int, choice: Choice) -> Batches | None:
    """For one weight, on devices where the kernel works, which nothing but a trial can tell.

    The trials also compile it for every division that is chosen, so that no captured call has to.
    """
    if dtype not in ("bfloat16", "float16") or not _works(dtype):
        return None
    kind = getattr(torch, dtype)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    found = {choice(rows, features, depth, processors) for rows in range(1, MOST_ROWS + 1)}
    gated = choice is choose_gated_batch
    usable = [d for d in found if d is not None and _passes(kind, d, gated)]
    return Batches(kind, processors, choice, usable) if usable else None


@cache
def _works(dtype: str) -> bool:
    """Once for a process: where it does not work at all, one warning is enough."""
    return _passes(getattr(torch, dtype), Division(1, 64), False)


def _passes(dtype: torch.dtype, division: Division, gated: bool) -> bool:
    warning = "no products of decode batches on Hopper here (%s): torch's linear serves"
    return passes(lambda: _right(dtype, division, gated), log, warning)


def _right(dtype: torch.dtype, division: Division, gated: bool) -> bool:
    """Several tiles both ways, with parts of tiles at the end of rows, features and depth."""
    made = torch.Generator("cuda").manual_seed(0)
    rows, width, depth = division.rows + 37, 64 * division.groups + 40, 64 * division.splits + 200

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device="cuda").to(dtype)

    x, weight = random(rows, depth), random(2 * width if gated else width, depth) * depth**-0.5
    batches = Batches(dtype, 1, choose_batch, ())
    want = F.linear(x.float(), weight.float())
    if gated:
        first, second = want.chunk(2, 1)
        want, got = F.silu(first) * second, batches.gated(x, weight, division)
    elif division.splits > 1:
        got = join(batches.parts(x, weight, division), None, dtype, early=True)
    else:
        bias = random(width)
        want, got = want + bias.float(), batches.whole(x, weight, bias, division)
        plain = batches.whole(x, weight, None, division) + bias
        if not bool((plain - want).norm() < 0.02 * want.norm()):
            return False
    return bool((got.float() - want).norm() < 0.02 * want.norm())
