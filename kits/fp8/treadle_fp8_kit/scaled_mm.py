"""Products in FP8 and int8, where the device has them and torch offers them.

Which forms work depends on the device, torch and cuBLAS, and torch says so only by an exception (or,
for a layout that it misreads, by wrong numbers). So each form is tried once for each shape of weight,
with different scales and numbers of rows, and used only if its results are right. Where Triton is
installed, kernels round the activations and multiply: in FP8 few rows, in int8 also many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treadle.api.cache import DeviceInfo
from treadle_fp8_kit import quantize
from treadle_fp8_kit.product_checks import check_blocks, check_experts, check_rows
from treadle_fp8_kit.quantize import FP8, INT8
from treadle_fp8_kit.tiles import BLOCK, Tile, choose_experts_tile, choose_int8_tile, choose_tile
from treadle_triton_kit.support import is_triton_installed, supports_pdl

__all__ = ("Grouping", "ScaledMM")

log = logging.getLogger(__name__)

MIN_CAPABILITY = {FP8: (8, 9), INT8: (8, 0)}
ROW_MULTIPLE = {FP8: 8, INT8: 32}
"""What the rows of activations are padded to: cuBLAS refuses a single row with scales by block, and less than
17 in int8."""
TILE_ROW_MULTIPLE = 128
"""What rows are padded to where that costs nothing: for 160 rows cuBLAS takes up to 1.5 times as long as
for 256."""


@dataclass(frozen=True, slots=True)
class _QuantizeCall:
    """How activations are rounded: by which function, with what beside them and the number of rows, of
    which cuBLAS takes a multiple of ``row_multiple``."""

    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    row_multiple: int


class Grouping(NamedTuple):
    """The choices of tokens, as ``treadle_triton_kit.expert_tiles.plan`` returns them for a tile."""

    order: Tensor
    tiles: Tensor
    tile: Tile


class ScaledMM:
    """``torch._scaled_mm`` in the two forms that checkpoints need, and ``torch._int_mm`` in the one of int8."""

    def __init__(self, device: DeviceInfo) -> None:
        capability = device.capability or (0, 0)
        is_cuda = device.type == "cuda"
        self._dtypes = {d for d, least in MIN_CAPABILITY.items() if is_cuda and capability >= least}
        self._kernels: Any = None
        self._use_pdl = supports_pdl(device)
        self._shared_bytes = 0
        if self._dtypes and torch.cuda.is_available() and is_triton_installed():
            self._kernels = import_module("treadle_fp8_kit.kernels")
            self._shared_bytes = self._kernels.shared_bytes()
        self._usable_forms: dict[tuple[str, torch.dtype, torch.dtype, torch.Size], bool] = {}
        self._failed_shapes: set[tuple[torch.dtype, torch.Size]] = set()
        """Types and shapes of weights for which the kernels failed."""

    # -- a scale for each row of both --------------------------------------------------

    def supports_rows(self, weight: Tensor, dtype: torch.dtype, *, has_zero: bool = False) -> bool:
        """Whether ``mm_rows`` can multiply by ``weight`` ``[out, in]``, FP8 or int8, for activations of ``dtype``;
        ``has_zero``: by ``sums``, too."""
        return self._is_usable(
            "rows and zero points" if has_zero else "rows",
            dtype,
            weight,
            (1 if weight.dtype is INT8 else 16, 16),
            lambda: check_rows(self, weight, dtype, has_zero),
        )

    def mm_rows(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        static: Tensor | None = None,
        limit: float | None = None,
        *,
        sums: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """``[..., in]`` to ``[..., out]``; ``scale`` ``[out]``. ``static``, a scalar, or each row's
        largest number (up to ``limit``) scales ``x``. ``gated``: ``ops.silu_and_mul`` of ``x``
        ``[..., 2 · in]`` is multiplied.

        With ``sums``, float32 ``[out]`` of what each output's int8 weights sum up to, activations have zero points;
        ``static`` is then ``[2]``, a scale and a zero point.
        """
        options = {"dtype": weight.dtype, "has_zero": sums is not None, "gated": gated}
        row_multiple = 1 if weight.dtype is FP8 else ROW_MULTIPLE[INT8]
        call = _QuantizeCall("quantize_per_row", (static, limit), options, row_multiple)
        return self._multiply(x, weight, scale, bias, call, sums)

    # -- a scale for each block ----------------------------------------------------------

    def supports_blocks(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether ``mm_blocks`` can multiply by ``weight`` ``[out, in]``."""
        return self._is_usable(
            "blocks",
            dtype,
            weight,
            (BLOCK, BLOCK),
            lambda: check_blocks(self, weight, dtype),
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
        call = _QuantizeCall("quantize_per_block", (), {"gated": gated}, ROW_MULTIPLE[FP8])
        return self._multiply(x, weight, scale, bias, call)

    # -- matrices of several experts ---------------------------------------------------------

    def supports_experts(
        self, weight: Tensor, scale: Tensor, dtype: torch.dtype, *, has_zero: bool = False
    ) -> bool:
        """Whether ``mm_experts`` can multiply by ``weight`` ``[experts, out, in]``, FP8 or int8, and ``scale``, for
        activations of ``dtype``; ``has_zero``: by ``sums``, too."""
        is_by_block = scale.dim() == 3
        form = "experts and blocks" if is_by_block else "experts"
        return self._kernels is not None and self._is_usable(
            f"{form} and zero points" if has_zero else form,
            dtype,
            weight,
            (BLOCK, BLOCK) if is_by_block else (1, 16),
            lambda: check_experts(self, weight, dtype, is_by_block, has_zero),
        )

    def group(self, topk_ids: Tensor, scale: Tensor) -> Grouping:
        """Sort what tokens chose, int64 ``[tokens, k]``, for products with all matrices of a layer; ``scale`` is that of any."""
        (tokens, k), experts = topk_ids.shape, len(scale)
        tile = choose_experts_tile(tokens, k, experts, has_block_scales=scale.dim() == 3)
        tile = tile.fit(self._shared_bytes)
        order, tiles = self._kernels.plan(topk_ids, experts, tile.block_m, use_pdl=self._use_pdl)
        return Grouping(order, tiles, tile)

    def mm_experts(
        self,
        x: Tensor,
        grouping: Grouping,
        weight: Tensor,
        scale: Tensor,
        static: Tensor | None = None,
        limit: float | None = None,
        *,
        sums: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """A row of ``x`` for each token, or for each choice, to ``[choices, out]``: by the weight of the chosen expert.

        ``scale`` is ``[experts, out]``, or ``[experts, out / 128, in / 128]``, contiguous; ``sums`` ``[experts, out]``. The rest
        is as for ``mm_rows``, without a static zero point: each row is rounded once.
        """
        if not len(x):
            return x.new_empty(0, weight.shape[1])
        options: dict[str, Any] = {"gated": gated, "use_pdl": self._use_pdl}
        if scale.dim() == 3:
            rounded = self._kernels.quantize_per_block(x, len(x), **options)
        else:
            options |= {"dtype": weight.dtype, "has_zero": sums is not None}
            rounded = self._kernels.quantize_per_row(x, static, limit, len(x), **options)
        y: Tensor = self._kernels.multiply(
            *rounded, weight, scale, None, x.dtype, grouping.tile,
            w_sum=sums, grouping=grouping[:2], use_pdl=self._use_pdl,
        )  # fmt: skip
        return y

    # -- either ---------------------------------------------------------------------------

    def _multiply(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        call: _QuantizeCall,
        sums: Tensor | None = None,
    ) -> Tensor:
        """Round with the kernels or with torch, and multiply."""
        x_2d = x.reshape(-1, x.shape[-1])
        num_rows = len(x_2d)
        if not num_rows:
            return x.new_empty(*x.shape[:-1], len(weight))
        is_failed = (weight.dtype, weight.shape) in self._failed_shapes
        kernels: Any = None if is_failed else self._kernels
        row_multiple, tile = call.row_multiple, None
        if kernels is not None:
            row_multiple = TILE_ROW_MULTIPLE
            tile = _tile(num_rows, weight, scale)
            tile = None if tile is None else tile.fit(self._shared_bytes)
        padded_rows = num_rows if tile is not None else -(-num_rows // row_multiple) * row_multiple
        quantize_fn = getattr(kernels or quantize, call.function)
        x_8bit, x_scale = quantize_fn(
            x_2d, *call.arguments, padded_rows, **call.options, use_pdl=self._use_pdl
        )
        scales = (scale, bias, x.dtype)
        if tile is not None:
            y: Tensor = kernels.multiply(
                x_8bit, x_scale, weight, *scales, tile, w_sum=sums, use_pdl=self._use_pdl
            )
        elif weight.dtype is INT8:
            products = torch._int_mm(x_8bit, weight.t())[:num_rows]
            y = quantize.scale_products(products, x_scale, *scales, sums)
        else:
            y = torch._scaled_mm(
                x_8bit,
                weight.t(),
                scale_a=x_scale,
                scale_b=scale.t() if scale.dim() == 2 else scale[None, :],
                out_dtype=x.dtype,
            )[:num_rows]
            y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], y.shape[-1])

    # -- trying ----------------------------------------------------------------------------

    def _is_usable(
        self,
        form: str,
        dtype: torch.dtype,
        weight: Tensor,
        multiples: tuple[int, int],
        check: Callable[[], bool],
    ) -> bool:
        sizes = zip(weight.shape[-2:], multiples, strict=True)
        is_misfit = any(n % multiple for n, multiple in sizes)
        if weight.dtype not in self._dtypes or dtype is torch.float32 or is_misfit:
            return False
        key = (form, dtype, weight.dtype, weight.shape)
        if key not in self._usable_forms:
            self._usable_forms[key] = self._check_form(form, weight, check)
        return self._usable_forms[key]

    def _check_form(self, form: str, weight: Tensor, check: Callable[[], bool]) -> bool:
        """Whether the form is right, if need be without the kernels."""
        name = "FP8" if weight.dtype is FP8 else "int8"
        try:
            works, reason = check(), "its result is wrong"
        except Exception as error:  # Triton and torch raise whatever they like
            works, reason = False, str(error)
        if works:
            return True
        shape = (weight.dtype, weight.shape)
        if weight.dim() == 3:
            log.info("no %s product of experts %s (%s)", name, list(shape[1]), reason)
            return False
        if self._kernels is not None and shape not in self._failed_shapes:
            log.info(
                "no %s kernels for weights %s (%s): trying without", name, list(shape[1]), reason
            )
            self._failed_shapes.add(shape)
            return self._check_form(form, weight, check)
        log.info("no %s product with scales by %s (%s): dequantizing", name, form, reason)
        return False


def _tile(rows: int, weight: Tensor, scale: Tensor) -> Tile | None:
    out_features, in_features = weight.shape
    if weight.dtype is INT8:
        return choose_int8_tile(rows, out_features, in_features)
    return choose_tile(rows, out_features, in_features, has_block_scales=scale.dim() == 2)
