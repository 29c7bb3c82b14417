"""Copying this rank's share of a checkpoint tensor into a parameter, by the parameter's ``Layout``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from treadle_layers_kit import Layout, Shard, WeightMismatchError, WeightTarget, layout_of

__all__ = ("load_weight", "weight_targets")


def weight_targets(name: str, parameter: Tensor) -> Iterator[WeightTarget]:
    """Every slot of a parameter that must be filled once."""
    layout = layout_of(parameter)
    items: Iterable[int | None] = range(layout.stack) if layout.stack else (None,)
    for item in items:
        for part in range(max(1, len(layout.outputs))):
            yield WeightTarget(name, part, item)


def load_weight(
    parameter: Tensor, tensor: Tensor, slot: WeightTarget, *, sibling_loaded: bool = False
) -> None:
    """Copy this rank's share of a checkpoint tensor into a parameter.

    ``slot.part`` ``None`` means that the tensor holds all fused matrices one after the other.
    ``sibling_loaded`` says that another fused matrix came before; where a parameter has no output features
    of its own (an input permutation), both must bring the same values.
    Raises ``WeightMismatchError`` when shape or dtype do not fit.
    """
    layout = layout_of(parameter)
    target = parameter.data
    if layout.stack:
        if slot.item is None:
            if tensor.shape[:1] != target.shape[:1]:
                raise WeightMismatchError(f"expected {target.shape[0]} stacked matrices")
            for item in range(layout.stack):
                _load_shard(layout, target[item], tensor[item], slot.part, sibling_loaded)
            return
        target = target[slot.item]
    _load_shard(layout, target, tensor, slot.part, sibling_loaded)


def _load_shard(
    layout: Layout, target: Tensor, tensor: Tensor, part: int | None, sibling_loaded: bool
) -> None:
    if layout.per_part:
        return _place_scalars(target, tensor, part)
    if layout.output_dim is None or len(layout.outputs) < 2:
        return _copy(layout, target, tensor, 0, sibling_loaded and layout.output_dim is None)
    if part is not None:
        return _copy(layout, target, tensor, part)
    sizes = [_blocks(p.total, layout.output_block) for p in layout.outputs]
    if tensor.dim() <= layout.output_dim or tensor.shape[layout.output_dim] != sum(sizes):
        raise WeightMismatchError(f"expected {sum(sizes)} in dimension {layout.output_dim}")
    first = 0
    for index, size in enumerate(sizes):
        _copy(layout, target, tensor.narrow(layout.output_dim, first, size), index)
        first += size


def _place_scalars(target: Tensor, tensor: Tensor, part: int | None) -> None:
    destination = target if part is None else target[part : part + 1]
    if tensor.numel() not in (1, destination.numel()):
        raise WeightMismatchError(f"expected one value or {destination.numel()}")
    _check_dtype(target, tensor)
    destination.copy_(tensor.reshape(-1).expand_as(destination))


def _copy(
    layout: Layout, target: Tensor, tensor: Tensor, part: int, must_match: bool = False
) -> None:
    """Copy one matrix. ``must_match``: a sibling filled the same place, and must agree with it."""
    shape = list(target.shape)
    source_range: list[tuple[int, int, int]] = []  # dimension, first, count: in the checkpoint
    if layout.output_dim is not None and layout.outputs:
        shard, block, dim = layout.outputs[part], layout.output_block, layout.output_dim
        offset = sum(_blocks(p.size, block) for p in layout.outputs[:part])
        count = _blocks(shard.size, block)
        target = target.narrow(dim, offset, count)
        shape[dim] = _blocks(shard.total, block)
        source_range.append((dim, _first_block(shard, block), count))
    if layout.input_dim is not None and layout.inputs is not None:
        shard, block, dim = layout.inputs, layout.input_block, layout.input_dim
        shape[dim] = _blocks(shard.total, block)
        source_range.append((dim, _first_block(shard, block), target.shape[dim]))
    tensor = _match_shape(tensor, shape)
    _check_dtype(target, tensor)
    for dim, first, count in source_range:
        num_available = max(0, min(count, tensor.shape[dim] - first))
        if num_available < count:
            target.narrow(dim, num_available, count - num_available).zero_()
            target = target.narrow(dim, 0, num_available)
        tensor = tensor.narrow(dim, min(first, tensor.shape[dim]), num_available)
    if must_match and not torch.equal(target, tensor.to(target.device, target.dtype)):
        raise WeightMismatchError("the fused matrices need the same values here, and they differ")
    target.copy_(tensor)


def _match_shape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor itself, or the same without or with dimensions of size one."""
    if list(tensor.shape) == list(shape):
        return tensor
    if [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
        raise WeightMismatchError(f"expected shape {list(shape)}")
    return tensor.reshape(tuple(shape))


def _check_dtype(target: Tensor, tensor: Tensor) -> None:
    """Numbers may change their precision; packed, quantized or integer data may not change."""
    float_dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    is_compatible = target.dtype == tensor.dtype or (
        target.dtype in float_dtypes and tensor.dtype in float_dtypes
    )
    if not is_compatible:
        raise WeightMismatchError(f"expected dtype {str(target.dtype).removeprefix('torch.')}")


def _blocks(features: int, block: int | Fraction) -> int:
    return -(-features // block)


def _first_block(shard: Shard, block: int | Fraction) -> int:
    ends_inside = shard.start + shard.size < shard.total and shard.size % block
    if shard.start % block or ends_inside:
        raise WeightMismatchError(
            f"this rank's features {shard.start} to {shard.start + shard.size} of {shard.total} cut "
            f"through blocks of {block}; use a smaller tensor_parallel_size"
        )
    return shard.start // block
