"""Operations between the ranks of one host, made by one kernel over memory that they share.

What they are is said in ``treadle.layers.kernels``. Each is used on all ranks or on none, and only after
all have tried it, against what they do without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from treadle.api.attention import KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.api.models import Collective, Shared
from treadle.layers.embedding import LMHead
from treadle.layers.norm import RMSNorm

if TYPE_CHECKING:
    from treadle.layers.kernels import Kernels

__all__ = ("Gather", "SumNorm", "install_between")

log = logging.getLogger(__name__)

Kernel = Callable[..., Any]
T = TypeVar("T", bound=Kernel)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16
"""Rows of whole multiples of it are moved at full speed."""
SUMMED, GATHERED = 4 << 20, 8 << 20
"""Bytes that the programs of a sum and of a gather have together: so many fit on an H200 at once."""
CHUNK = 8192
"""Bytes that a program of a gather has."""


class Trial(NamedTuple):
    """Arguments, the results that are right, and how far each may be off."""

    given: tuple[Any, ...]
    wanted: tuple[Tensor, ...]
    slack: tuple[float, ...]


class SumNorm:
    """``all_reduce_add_rms_norm`` for rows of ``size``, together ``most`` bytes; ``None`` for what does not fit,
    alike on all ranks."""

    def __init__(
        self, kernel: Kernel, memory: Shared, size: int, dtype: torch.dtype, most: int
    ) -> None:
        self._kernel, self._memory = kernel, memory
        self._size, self._dtype = size, dtype
        self._most = most // dtype.itemsize

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor] | None:
        fits = (
            0 < x.numel() <= self._most
            and x.shape == residual.shape
            and x.shape[-1] == self._size
            and x.dtype == residual.dtype == self._dtype
            and x.is_contiguous()
            and residual.is_contiguous()
        )
        if not fits:
            return None
        memory = self._memory
        y, total = self._kernel(
            x, residual, weight, eps, offset, memory.places, memory.counts, memory.rank
        )
        return y, total


class Gather:
    """``all_gather`` for rows of ``size``; ``None`` for what does not fit, alike on all ranks."""

    def __init__(self, kernel: Kernel, memory: Shared, size: int, dtype: torch.dtype) -> None:
        self._kernel, self._memory = kernel, memory
        self._size, self._dtype = size, dtype

    def __call__(self, x: Tensor) -> Tensor | None:
        fits = (
            x.dim() == 2
            and x.numel() > 0
            and x.shape[1] == self._size
            and x.dtype == self._dtype
            and x.stride(1) == 1
        )
        if not fits:
            return None
        memory = self._memory
        y: Tensor = self._kernel(x, memory.places, memory.counts, memory.rank, memory.limit)
        return y


def install_between(
    model: nn.Module, host: Kernels, device: DeviceInfo, dtype: str
) -> dict[str, str]:
    """Give norms that sum and output heads their kernels, where ranks share memory.

    Returns which backend serves which operation. Every rank must call it alike, after the kernels that
    need no other rank.
    """
    offers = _Offers(host, device, dtype)
    norms: dict[tuple[int, torch.dtype], SumNorm | None] = {}
    for module in model.modules() if device.kind == "cuda" else ():
        if isinstance(module, RMSNorm) and module.ranks is not None:
            key = module.weight.shape[0], module.weight.dtype
            if key not in norms:  # norms run one after the other: they can share their memory
                norms[key] = offers.sum_norm(module, module.ranks)
            module.sum_op = norms[key]
        elif isinstance(module, LMHead):
            module.gather_op = offers.gather(module)
    return offers.serving


class _Offers:
    """``serving`` is which backend serves which operation."""

    def __init__(self, host: Kernels, device: DeviceInfo, dtype: str) -> None:
        self._host, self._device, self._dtype = host, device, dtype
        self.serving: dict[str, str] = {}

    def sum_norm(self, norm: RMSNorm, ranks: Collective) -> SumNorm | None:
        """What norms of this size and dtype can use, if all ranks can."""
        size, dtype = norm.weight.shape[0], norm.weight.dtype
        row = size * dtype.itemsize
        most, padded = ranks.sum_limit, (1 << (size - 1).bit_length()) * dtype.itemsize
        units = min(most, SUMMED) // padded
        if not units or row % ALIGNMENT or dtype not in DTYPES:
            return None
        return self._agreed(
            "all_reduce_add_rms_norm",
            ranks,
            {"size": size},
            (units * padded, units),
            lambda kernel, memory: SumNorm(kernel, memory, size, dtype, most),
            lambda home: _sums(norm, ranks, min(units + 1, most // row), home),
        )

    def gather(self, head: LMHead) -> Gather | None:
        """What a head can use, if all ranks can."""
        ranks, size, dtype = head.ranks, head.out_features, head.dtype
        row = size * dtype.itemsize
        shares = ranks.size > 1 and ranks.sum_limit
        if not shares or row % ALIGNMENT or dtype not in DTYPES:
            return None
        return self._agreed(
            "all_gather",
            ranks,
            {},
            (GATHERED, GATHERED // CHUNK),
            lambda kernel, memory: Gather(kernel, memory, size, dtype),
            lambda home: _gathers(ranks, GATHERED // row + 1, size, dtype, home),
        )

    def _agreed(
        self,
        op: str,
        ranks: Collective,
        shape: dict[str, int],
        memory: tuple[int, int],
        make: Callable[[Kernel, Shared], T],
        trials: Callable[[torch.device], Iterator[Trial]],
    ) -> T | None:
        """``make`` of the best kernel and memory of ``(limit, units)``, if all ranks pass all trials.

        The ranks agree after each step that can fail, so that none waits for one that gave up.
        """
        request = KernelRequest(self._device, self._dtype, {"ranks": ranks.size, **shape})
        offer = self._host.kernel(op, request)
        reason = kernel = None
        try:
            kernel = offer.load() if offer is not None else None
        except Exception as error:  # a plugin's
            reason = f"{type(error).__name__}: {error}"
        if not ranks.smallest([int(kernel is not None)])[0] or offer is None or kernel is None:
            if offer is not None:
                _without(ranks, op, reason)
            return None
        found = ranks.share(*memory)
        if found is None:
            _without(ranks, op, "there is no memory to share")
            return None
        made = make(kernel, found)
        for trial in trials(found.places.device):
            try:
                reason = None if _passes(made, trial) else "its result is wrong"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if not ranks.smallest([int(reason is None)])[0]:
                _without(ranks, op, reason)
                return None
        self.serving[op] = offer.name
        return made


def _without(ranks: Collective, op: str, reason: str | None) -> None:
    if ranks.rank == 0:
        log.info("%s is not used: %s", op, reason or "another rank could not")


@torch.inference_mode()
def _passes(made: Callable[..., Any], trial: Trial) -> bool:
    found = made(*trial.given)
    found = (found,) if isinstance(found, Tensor) else found
    return found is not None and all(
        torch.allclose(y, want, rtol=slack, atol=slack)
        for y, want, slack in zip(found, trial.wanted, trial.slack, strict=True)
    )


def _sums(norm: RMSNorm, ranks: Collective, rows: int, device: torch.device) -> Iterator[Trial]:
    """What the ranks' own sum and the norm's own operation make of several numbers of rows."""
    size, dtype = norm.weight.shape[0], norm.weight.dtype
    weight = _numbers(1, size, 3, dtype, device)[0] + 1
    for count in (1, rows, min(3, rows)):
        x = _numbers(count, size, 13, dtype, device) - ranks.rank
        residual = _numbers(count, size, 7, dtype, device)
        total = ranks.all_reduce(x.clone())
        wanted = norm.add_op(total, residual.clone(), weight, norm.eps, norm.offset)
        yield Trial((x, residual, weight, norm.eps, norm.offset), wanted, (2e-2, 0.0))


def _gathers(
    ranks: Collective, rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Trial]:
    """What the ranks' own gather makes of several numbers of rows."""
    for count in (1, rows, min(3, rows)):
        x = _numbers(count, size, 251, dtype, device) - ranks.rank
        yield Trial((x,), (ranks.all_gather(x),), (0.0,))


def _numbers(rows: int, size: int, below: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Whole numbers that every type holds, so that the order of a sum does not matter."""
    return (torch.arange(rows * size, device=device) % below).to(dtype).view(rows, size)
