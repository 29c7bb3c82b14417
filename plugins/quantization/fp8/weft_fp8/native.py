"""Products in FP8, where the device has them and torch offers them.

Which forms work depends on the device, torch and cuBLAS, and torch says so only by an exception (or,
for a layout that it misreads, by wrong numbers). So each form is tried once, on small matrices with
different scales, and used only if its result is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from weft.api.cache import DeviceInfo

__all__ = ("LARGEST", "Native")

log = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
BLOCK = 128


class Native:
    """``torch._scaled_mm`` in the two forms that checkpoints need."""

    def __init__(self, device: DeviceInfo) -> None:
        self._possible = device.kind == "cuda" and (device.capability or (0, 0)) >= (8, 9)
        self._found: dict[tuple[str, torch.dtype], bool] = {}

    # -- a scale for each row of both --------------------------------------------------

    def by_rows(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``rows`` can multiply by ``weight`` ``[out, in]`` for activations of ``dtype``."""
        return self._usable("rows", dtype, weight, 16, lambda: _try_rows(self, weight, dtype))

    def rows(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        static: Tensor | None = None,
        limit: float | None = None,
    ) -> Tensor:
        """``[..., in]`` to ``[..., out]``; ``scale`` ``[out]``. ``static``, a scalar, or each row's
        largest number (up to ``limit``) scales ``x``."""
        flat = x.reshape(-1, x.shape[-1])
        if static is None:
            largest = flat.abs().amax(dim=1, keepdim=True).float()
            if limit is not None:
                largest = largest.clamp_max(limit)
            own = (largest / LARGEST).clamp_min(1e-12)
        else:
            own = static.repeat(len(flat), 1)  # for one row, an expanded scalar has strides of 0
        y = torch._scaled_mm(
            _rounded(flat, own),
            weight.t(),
            scale_a=own,
            scale_b=scale[None, :],
            out_dtype=x.dtype,
        )
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    # -- a scale for each block ----------------------------------------------------------

    def by_blocks(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``blocks`` can multiply by ``weight`` ``[out, in]``."""
        return self._usable(
            "blocks", dtype, weight, BLOCK, lambda: _try_blocks(self, weight, dtype)
        )

    def laid_out(self, scale: Tensor) -> Tensor:
        """Block scales ``[out / 128, in / 128]`` with rows a multiple of four numbers apart."""
        rows, columns = scale.shape
        wide = scale.new_zeros(rows, -(-columns // 4) * 4)
        wide[:, :columns] = scale
        return wide[:, :columns]

    def blocks(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """``[..., in]`` to ``[..., out]``; ``scale`` as from ``laid_out``."""
        flat = x.reshape(-1, x.shape[-1])
        pieces = flat.unflatten(1, (-1, BLOCK))
        own = (pieces.abs().amax(dim=2).float() / LARGEST).clamp_min(1e-12)
        rounded = _rounded(pieces, own[..., None]).flatten(1)
        y = torch._scaled_mm(
            rounded,
            weight.t(),
            scale_a=own.t().contiguous().t(),  # the scales of one column lie side by side
            scale_b=scale.t(),
            out_dtype=x.dtype,
        )
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    # -- trying ----------------------------------------------------------------------------

    def _usable(
        self, form: str, dtype: torch.dtype, weight: Tensor, multiple: int, test: Callable[[], bool]
    ) -> bool:
        if not self._possible or dtype is torch.float32 or any(n % multiple for n in weight.shape):
            return False
        key = (form, dtype)
        if key not in self._found:
            try:
                self._found[key] = test()
                reason = "its result is wrong"
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                self._found[key], reason = False, str(error)
            if not self._found[key]:
                log.info("no FP8 product with scales by %s (%s): dequantizing", form, reason)
        return self._found[key]


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    # The cast makes NaN of what is too large, so it must be cut off before.
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def _sample(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations and an FP8 weight, small and the same on every device."""
    made = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4 * BLOCK, generator=made) * torch.logspace(-1, 1, 4 * BLOCK)
    weight = torch.randn(3 * BLOCK, 4 * BLOCK, generator=made)
    return x.to(device, dtype), weight.to(device, FP8)


def _try_rows(native: Native, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _sample(like.device, dtype)
    scale = torch.linspace(0.5, 2.0, len(weight), device=like.device)
    return _close(native.rows(x, weight, scale, None), x, weight.float() * scale[:, None])


def _try_blocks(native: Native, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _sample(like.device, dtype)
    scale = native.laid_out(torch.linspace(0.5, 2.0, 12, device=like.device).view(3, 4))
    dense = weight.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return _close(native.blocks(x, weight, scale, None), x, dense)


def _close(found: Tensor, x: Tensor, dense: Tensor) -> bool:
    """Within what rounding the activations to FP8 costs."""
    wanted = x.float() @ dense.t()
    return bool((found.float() - wanted).norm() < 0.05 * wanted.norm())
