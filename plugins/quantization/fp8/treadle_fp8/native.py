"""Products in FP8, where the device has them and torch offers them.

Which forms work depends on the device, torch and cuBLAS, and torch says so only by an exception (or,
for a layout that it misreads, by wrong numbers). So each form is tried once for each shape of weight,
with different scales and numbers of rows, and used only if its results are right. Where Triton is
installed, kernels round the activations, and multiply few rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from treadle.api.cache import DeviceInfo
from treadle_fp8 import rounding
from treadle_fp8.rounding import FP8
from treadle_fp8.tiles import BLOCK, choose
from treadle_triton_kit.support import is_triton_installed, supports_pdl

__all__ = ("ScaledMM",)

log = logging.getLogger(__name__)

ROWS = 8
"""What the rows of activations with scales by block are padded to: cuBLAS refuses a single row."""
ROWS_OF_TILE = 128
"""What rows are padded to where that costs nothing: for 160 rows cuBLAS takes up to 1.5 times as long as
for 256."""


@dataclass(frozen=True, slots=True)
class _QuantizeCall:
    """How activations are rounded: by which function, with what beside them and the number of rows, of
    which cuBLAS takes a multiple of ``step``."""

    rounding: str
    arguments: tuple[Any, ...]
    gated: bool
    step: int


class ScaledMM:
    """``torch._scaled_mm`` in the two forms that checkpoints need."""

    def __init__(self, device: DeviceInfo) -> None:
        capability = device.capability or (0, 0)
        self._possible = device.type == "cuda" and capability >= (8, 9)
        self._kernels: Any = None
        self._early = supports_pdl(device)
        if self._possible and torch.cuda.is_available() and is_triton_installed():
            self._kernels = import_module("treadle_fp8.kernels")
        self._kernels_of: dict[tuple[str, torch.dtype, torch.Size], bool] = {}
        self._without: set[torch.Size] = set()
        """Shapes of weights for which the kernels failed."""

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
        *,
        gated: bool = False,
    ) -> Tensor:
        """``[..., in]`` to ``[..., out]``; ``scale`` ``[out]``. ``static``, a scalar, or each row's
        largest number (up to ``limit``) scales ``x``. ``gated``: ``ops.silu_and_mul`` of ``x``
        ``[..., 2 · in]`` is multiplied."""
        way = _QuantizeCall("quantize_per_row", (static, limit), gated, 1)
        return self._product(x, weight, scale, scale[None, :], bias, way)

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

    def blocks(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, gated: bool = False
    ) -> Tensor:
        """``[..., in]`` to ``[..., out]``; ``scale`` as from ``laid_out``; ``gated`` as for ``rows``."""
        way = _QuantizeCall("quantize_per_block", (), gated, ROWS)
        return self._product(x, weight, scale, scale.t(), bias, way)

    # -- either ---------------------------------------------------------------------------

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        transposed: Tensor,  # the scale as cuBLAS wants it
        bias: Tensor | None,
        way: _QuantizeCall,
    ) -> Tensor:
        """Round with the kernels or with torch, and multiply."""
        flat = x.reshape(-1, x.shape[-1])
        rows = len(flat)
        if not rows:
            return x.new_empty(*x.shape[:-1], len(weight))
        kernels: Any = None if weight.shape in self._without else self._kernels
        step, tile = way.step, None
        if kernels is not None:
            step = ROWS_OF_TILE
            tile = choose(rows, weight.shape[0], weight.shape[1], blocks=scale.dim() == 2)
        room = rows if tile is not None else -(-rows // step) * step
        rounds = getattr(kernels or rounding, way.rounding)
        few, own = rounds(flat, *way.arguments, room, gated=way.gated, early=self._early)
        if tile is None:
            y = torch._scaled_mm(
                few, weight.t(), scale_a=own, scale_b=transposed, out_dtype=x.dtype
            )[:rows]
            y = y if bias is None else y + bias
        else:
            y = kernels.multiply(few, own, weight, scale, bias, x.dtype, tile, early=self._early)
        return y.view(*x.shape[:-1], y.shape[-1])

    # -- trying ----------------------------------------------------------------------------

    def _usable(
        self, form: str, dtype: torch.dtype, weight: Tensor, multiple: int, test: Callable[[], bool]
    ) -> bool:
        if not self._possible or dtype is torch.float32 or any(n % multiple for n in weight.shape):
            return False
        key = (form, dtype, weight.shape)
        if key not in self._kernels_of:
            self._kernels_of[key] = self._works(form, weight.shape, test)
        return self._kernels_of[key]

    def _works(self, form: str, shape: torch.Size, test: Callable[[], bool]) -> bool:
        """Whether the form is right, if need be without the kernels."""
        try:
            works, reason = test(), "its result is wrong"
        except Exception as error:  # Triton and torch raise whatever they like
            works, reason = False, str(error)
        if works:
            return True
        if self._kernels is not None and shape not in self._without:
            log.info("no FP8 kernels for weights %s (%s): trying without", list(shape), reason)
            self._without.add(shape)
            return self._works(form, shape, test)
        log.info("no FP8 product with scales by %s (%s): dequantizing", form, reason)
        return False


def _sample(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations for a weight, and another FP8 weight of its shape."""
    made = torch.Generator(like.device).manual_seed(0)
    outputs, inputs = like.shape
    kwargs: dict[str, Any] = {"generator": made, "device": like.device, "dtype": torch.float16}
    x = torch.randn(80, inputs, **kwargs) * torch.logspace(-1, 1, inputs, device=like.device)
    return x.to(dtype), torch.randn(outputs, inputs, **kwargs).to(FP8)


def _try_rows(native: ScaledMM, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _sample(like, dtype)
    scale = torch.linspace(0.5, 2.0, len(weight), device=like.device)
    dense = weight[:BLOCK].float() * scale[:BLOCK, None]
    return all(_close(native.rows(part, weight, scale, None), part, dense) for part in _parts(x))


def _try_blocks(native: ScaledMM, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _sample(like, dtype)
    shape = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    scale = torch.linspace(0.5, 2.0, shape[0] * shape[1], device=like.device)
    scale = native.laid_out(scale.view(shape))
    dense = weight[:BLOCK].float() * scale[0].repeat_interleave(BLOCK)
    return all(_close(native.blocks(part, weight, scale, None), part, dense) for part in _parts(x))


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """One row, an odd number, many: whether a form works may depend on it."""
    return x[:1], x[:5], x[:24], x


def _close(found: Tensor, x: Tensor, dense: Tensor) -> bool:
    """Within what rounding the activations to FP8 costs; ``dense`` are the first outputs' weights."""
    wanted = x.float() @ dense.t()
    return bool((found[:, : len(dense)].float() - wanted).norm() < 0.05 * wanted.norm())
