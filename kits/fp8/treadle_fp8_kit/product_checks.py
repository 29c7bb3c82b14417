"""What products must compute before they serve: random weights of the same shape, different scales, several numbers of rows."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treadle_fp8_kit.quantize import FP8, INT8
from treadle_fp8_kit.tiles import BLOCK

if TYPE_CHECKING:
    from treadle_fp8_kit.scaled_mm import ScaledMM

__all__ = ("check_blocks", "check_experts", "check_rows")

MANY = 520
"""Rows of a product whose kernel has the tile of large batches."""


def _random_case(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations for a weight, and another weight of its type and shape."""
    generator = torch.Generator(weight.device).manual_seed(0)
    outputs, inputs = weight.shape
    kwargs: dict[str, Any] = {
        "generator": generator,
        "device": weight.device,
        "dtype": torch.float16,
    }
    x = torch.randn(MANY, inputs, **kwargs) * torch.logspace(-1, 1, inputs, device=weight.device)
    random = torch.randn(outputs, inputs, **kwargs)
    return x.to(dtype), (random * 30).to(INT8) if weight.dtype is INT8 else random.to(FP8)


def check_rows(scaled_mm: ScaledMM, like: Tensor, dtype: torch.dtype, has_zero: bool) -> bool:
    x, weight = _random_case(like, dtype)
    scale = torch.linspace(0.5, 2.0, len(weight), device=like.device)
    dense = weight[:BLOCK].float() * scale[:BLOCK, None]
    sums = weight.sum(dim=1).float() if has_zero else None
    batches = _batches(x) if weight.dtype is FP8 else (*_batches(x), x)
    return all(
        _is_close(scaled_mm.mm_rows(part, weight, scale, None, sums=sums), part, dense)
        for part in batches
    )


def check_blocks(scaled_mm: ScaledMM, like: Tensor, dtype: torch.dtype) -> bool:
    x, weight = _random_case(like, dtype)
    shape = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    scale = torch.linspace(0.5, 2.0, shape[0] * shape[1], device=like.device)
    scale = scaled_mm.pad_block_scale(scale.view(shape))
    dense = weight[:BLOCK].float() * scale[0].repeat_interleave(BLOCK)
    return all(
        _is_close(scaled_mm.mm_blocks(part, weight, scale, None), part, dense)
        for part in _batches(x)
    )


def check_experts(
    scaled_mm: ScaledMM, like: Tensor, dtype: torch.dtype, is_by_block: bool, has_zero: bool
) -> bool:
    """With the sizes of few experts, of which the last one is chosen by nobody."""
    experts = min(len(like), 4)
    x, first = _random_case(like[0], dtype)
    rolled = [first.view(torch.uint8).roll(expert, 0) for expert in range(experts)]
    weight = torch.stack(rolled).view(like.dtype)
    _, out_features, in_features = weight.shape
    dense = weight[:, :BLOCK].float()
    shape: tuple[int, ...] = experts, out_features
    if is_by_block:
        shape = experts, out_features // BLOCK, in_features // BLOCK
        scale = torch.linspace(0.5, 2.0, prod(shape), device=like.device).view(shape)
        dense *= scale[:, :1].repeat_interleave(BLOCK, 2)
    else:
        scale = torch.linspace(0.5, 2.0, prod(shape), device=like.device).view(shape)
        dense *= scale[:, :BLOCK, None]
    sums = weight.sum(dim=2).float() if has_zero else None
    for part in (*_batches(x), x):
        chosen = torch.arange(len(part), device=x.device) % max(1, experts - 1)
        grouping = scaled_mm.group(chosen[:, None], scale)
        y = scaled_mm.mm_experts(part, grouping, weight, scale, sums=sums)
        by_all = (part.float() @ dense.flatten(0, 1).t()).unflatten(1, (experts, -1))
        if not _is_near(y, by_all[torch.arange(len(part), device=x.device), chosen]):
            return False
    return True


def _batches(x: Tensor) -> tuple[Tensor, ...]:
    """One row, an odd number, more: whether a form works may depend on it."""
    return x[:1], x[:5], x[:24], x[:80]


def _is_close(actual: Tensor, x: Tensor, dense: Tensor) -> bool:
    """Within what rounding the activations to FP8 costs; ``dense`` are the first outputs' weights."""
    return _is_near(actual, x.float() @ dense.t())


def _is_near(actual: Tensor, expected: Tensor) -> bool:
    part = actual[:, : expected.shape[1]].float()
    return bool((part - expected).norm() < 0.05 * expected.norm())
