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
from treadle_fp8_kit import quantize
from treadle_fp8_kit.quantize import FP8
from treadle_fp8_kit.tiles import BLOCK, choose_tile
from treadle_triton_kit.support import is_triton_installed, supports_pdl

__all__ = ("ScaledMM",)

log = logging.getLogger(__name__)

ROW_MULTIPLE = 8
"""What the rows of activations with scales by block are padded to: cuBLAS refuses a single row."""
TILE_ROW_MULTIPLE = 128
"""What rows are padded to where that costs nothing: for 160 rows cuBLAS takes up to 1.5 times as long as
for 256."""


@dataclass(frozen=True, slots=True)
class _QuantizeCall:
    """How activations are rounded: by which function, with what beside them and the number of rows, of
    which cuBLAS takes a multiple of ``row_multiple``."""

    function: str
    arguments: tuple[Any, ...]
    gated: bool
    row_multiple: int


class ScaledMM:
    """``torch._scaled_mm`` in the two forms that checkpoints need."""

    def __init__(self, device: DeviceInfo) -> None:
        capability = device.capability or (0, 0)
        self._is_supported = device.type == "cuda" and capability >= (8, 9)
        self._kernels: Any = None
        self._use_pdl = supports_pdl(device)
        if self._is_supported and torch.cuda.is_available() and is_triton_installed():
            self._kernels = import_module("treadle_fp8_kit.kernels")
        self._usable_forms: dict[tuple[str, torch.dtype, torch.Size], bool] = {}
        self._failed_shapes: set[torch.Size] = set()
        """Shapes of weights for which the kernels failed."""

    # -- a scale for each row of both --------------------------------------------------

    def supports_rows(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``mm_rows`` can multiply by ``weight`` ``[out, in]`` for activations of ``dtype``."""
        return self._is_usable("rows", dtype, weight, 16, lambda: _check_rows(self, weight, dtype))

    def mm_rows(
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
        call = _QuantizeCall("quantize_per_row", (static, limit), gated, 1)
        return self._multiply(x, weight, scale, scale[None, :], bias, call)

    # -- a scale for each block ----------------------------------------------------------

    def supports_blocks(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``mm_blocks`` can multiply by ``weight`` ``[out, in]``."""
        return self._is_usable(
            "blocks", dtype, weight, BLOCK, lambda: _check_blocks(self, weight, dtype)
        )

    def pad_block_scale(self, scale: Tensor) -> Tensor:
        """Block scales ``[out / 128, in / 128]`` with rows a multiple of four numbers apart."""
        rows, columns = scale.shape
        padded = scale.new_zeros(rows, -(-columns // 4) * 4)
        padded[:, :columns] = scale
        return padded[:, :columns]

    def mm_blocks(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *, gated: bool = False
    ) -> Tensor:
        """``[..., in]`` to ``[..., out]``; ``scale`` as from ``pad_block_scale``; ``gated`` as for ``mm_rows``."""
        call = _QuantizeCall("quantize_per_block", (), gated, ROW_MULTIPLE)
        return self._multiply(x, weight, scale, scale.t(), bias, call)

    # -- either ---------------------------------------------------------------------------

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        transposed: Tensor,  # the scale as cuBLAS wants it
        bias: Tensor | None,
        call: _QuantizeCall,
    ) -> Tensor:
        """Round with the kernels or with torch, and multiply."""
        x_2d = x.reshape(-1, x.shape[-1])
        num_rows = len(x_2d)
        if not num_rows:
            return x.new_empty(*x.shape[:-1], len(weight))
        kernels: Any = None if weight.shape in self._failed_shapes else self._kernels
        row_multiple, tile = call.row_multiple, None
        if kernels is not None:
            row_multiple = TILE_ROW_MULTIPLE
            tile = choose_tile(
                num_rows, weight.shape[0], weight.shape[1], has_block_scales=scale.dim() == 2
            )
        padded_rows = num_rows if tile is not None else -(-num_rows // row_multiple) * row_multiple
        quantize_fn = getattr(kernels or quantize, call.function)
        x_fp8, x_scale = quantize_fn(
            x_2d, *call.arguments, padded_rows, gated=call.gated, use_pdl=self._use_pdl
        )
        if tile is None:
            y = torch._scaled_mm(
                x_fp8, weight.t(), scale_a=x_scale, scale_b=transposed, out_dtype=x.dtype
            )[:num_rows]
            y = y if bias is None else y + bias
        else:
            y = kernels.multiply(
                x_fp8, x_scale, weight, scale, bias, x.dtype, tile, use_pdl=self._use_pdl
            )
        return y.view(*x.shape[:-1], y.shape[-1])

    # -- trying ----------------------------------------------------------------------------

    def _is_usable(
        self,
        form: str,
        dtype: torch.dtype,
        weight: Tensor,
        multiple: int,
        check: Callable[[], bool],
    ) -> bool:
        if (
            not self._is_supported
            or dtype is torch.float32
            or any(n % multiple for n in weight.shape)
        ):
            return False
        key = (form, dtype, weight.shape)
        if key not in self._usable_forms:
            self._usable_forms[key] = self._check_form(form, weight.shape, check)
        return self._usable_forms[key]

    def _check_form(self, form: str, shape: torch.Size, check: Callable[[], bool]) -> bool:
        """Whether the form is right, if need be without the kernels."""
        try:
            works, reason = check(), "its result is wrong"
        except Exception as error:  # Triton and torch raise whatever they like
            works, reason = False, str(error)
        if works:
            return True
        if self._kernels is not None and shape not in self._failed_shapes:
            log.info("no FP8 kernels for weights %s (%s): trying without", list(shape), reason)
            self._failed_shapes.add(shape)
            return self._check_form(form, shape, check)
        log.info("no FP8 product with scales by %s (%s): dequantizing", form, reason)
        return False


def _random_case(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations for a weight, and another FP8 weight of its shape."""
    generator = torch.Generator(weight.device).manual_seed(0)
    outputs, inputs = weight.shape
    kwargs: dict[str, Any] = {
        "generator": generator,
        "device": weight.device,
        "dtype": torch.float16,
    }
    x = torch.randn(80, inputs, **kwargs) * torch.logspace(-1, 1, inputs, device=weight.device)
    return x.to(dtype), torch.randn(outputs, inputs, **kwargs).to(FP8)


def _check_rows(scaled_mm: ScaledMM, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _random_case(like, dtype)
    scale = torch.linspace(0.5, 2.0, len(weight), device=like.device)
    dense = weight[:BLOCK].float() * scale[:BLOCK, None]
    return all(
        _is_close(scaled_mm.mm_rows(part, weight, scale, None), part, dense) for part in _batches(x)
    )


def _check_blocks(scaled_mm: ScaledMM, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _random_case(like, dtype)
    shape = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    scale = torch.linspace(0.5, 2.0, shape[0] * shape[1], device=like.device)
    scale = scaled_mm.pad_block_scale(scale.view(shape))
    dense = weight[:BLOCK].float() * scale[0].repeat_interleave(BLOCK)
    return all(
        _is_close(scaled_mm.mm_blocks(part, weight, scale, None), part, dense)
        for part in _batches(x)
    )


def _batches(x: Tensor) -> tuple[Tensor, ...]:
    """One row, an odd number, many: whether a form works may depend on it."""
    return x[:1], x[:5], x[:24], x


def _is_close(actual: Tensor, x: Tensor, dense: Tensor) -> bool:
    """Within what rounding the activations to FP8 costs; ``dense`` are the first outputs' weights."""
    expected = x.float() @ dense.t()
    return bool((actual[:, : len(dense)].float() - expected).norm() < 0.05 * expected.norm())
