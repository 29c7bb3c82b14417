"""Products in FP8, where the device has them and torch offers them.

Which forms work depends on the device, torch and cuBLAS, and torch says so only by an exception (or,
for a layout that it misreads, by wrong numbers). So each form is tried once for each shape of weight,
with different scales and numbers of rows, and used only if its results are right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.api.cache import DeviceInfo

__all__ = ("LARGEST", "Native")

log = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
BLOCK = 128
ROWS = 8
"""What the rows of activations with scales by block are padded to: cuBLAS refuses a single row."""


class Native:
    """``torch._scaled_mm`` in the two forms that checkpoints need."""

    def __init__(self, device: DeviceInfo) -> None:
        self._possible = device.kind == "cuda" and (device.capability or (0, 0)) >= (8, 9)
        self._found: dict[tuple[str, torch.dtype, torch.Size], bool] = {}

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
        rows = len(flat)
        flat = F.pad(
            flat, (0, 0, 0, -rows % ROWS if rows else ROWS)
        )  # nor is none a number of rows
        pieces = flat.unflatten(1, (-1, BLOCK))
        own = (pieces.abs().amax(dim=2).float() / LARGEST).clamp_min(1e-12)
        rounded = _rounded(pieces, own[..., None]).flatten(1)
        y = torch._scaled_mm(
            rounded,
            weight.t(),
            scale_a=own.t().contiguous().t(),  # the scales of one column lie side by side
            scale_b=scale.t(),
            out_dtype=x.dtype,
        )[:rows]
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    # -- trying ----------------------------------------------------------------------------

    def _usable(
        self, form: str, dtype: torch.dtype, weight: Tensor, multiple: int, test: Callable[[], bool]
    ) -> bool:
        if not self._possible or dtype is torch.float32 or any(n % multiple for n in weight.shape):
            return False
        key = (form, dtype, weight.shape)
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


def _sample(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations for a weight, and another FP8 weight of its shape."""
    made = torch.Generator(like.device).manual_seed(0)
    outputs, inputs = like.shape
    kwargs: dict[str, Any] = {"generator": made, "device": like.device, "dtype": torch.float16}
    x = torch.randn(24, inputs, **kwargs) * torch.logspace(-1, 1, inputs, device=like.device)
    return x.to(dtype), torch.randn(outputs, inputs, **kwargs).to(FP8)


def _try_rows(native: Native, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _sample(like, dtype)
    scale = torch.linspace(0.5, 2.0, len(weight), device=like.device)
    dense = weight[:BLOCK].float() * scale[:BLOCK, None]
    return all(_close(native.rows(part, weight, scale, None), part, dense) for part in _parts(x))


def _try_blocks(native: Native, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _sample(like, dtype)
    shape = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    scale = torch.linspace(0.5, 2.0, shape[0] * shape[1], device=like.device)
    scale = native.laid_out(scale.view(shape))
    dense = weight[:BLOCK].float() * scale[0].repeat_interleave(BLOCK)
    return all(_close(native.blocks(part, weight, scale, None), part, dense) for part in _parts(x))


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """One row, an odd number, many: whether a form works may depend on it."""
    return x[:1], x[:5], x


def _close(found: Tensor, x: Tensor, dense: Tensor) -> bool:
    """Within what rounding the activations to FP8 costs; ``dense`` are the first outputs' weights."""
    wanted = x.float() @ dense.t()
    return bool((found[:, : len(dense)].float() - wanted).norm() < 0.05 * wanted.norm())
