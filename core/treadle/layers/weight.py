"""Parameters that know how a checkpoint fills them.

A layer or a quantization plugin makes its parameters with ``empty_weight`` and says which dimension
holds output features, which holds input features, and how many features one element stands for.
The layer then binds its partition to them. With both, the loader cuts the right piece out of a
checkpoint tensor and puts it into the right place, so that no plugin writes code for tensor
parallelism or for fused projections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = (
    "Layout",
    "Quantizable",
    "Shard",
    "Sharded",
    "SupportsPostLoad",
    "SupportsWeightLookup",
    "WeightMismatchError",
    "WeightTarget",
    "empty_weight",
    "layout_of",
    "load_weight",
    "set_shards",
    "weight_targets",
)


@dataclass(frozen=True, slots=True)
class Shard:
    """A run of features: ``total`` of them in the checkpoint, ``[start, start + size)`` here.

    The share may reach beyond ``total`` (a padded vocabulary); what is beyond is filled with zero.
    """

    total: int
    start: int
    size: int

    @classmethod
    def full(cls, features: int) -> Shard:
        return cls(features, 0, features)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one parameter relates to the matrices of the checkpoint.

    ``output_dim`` and ``input_dim`` are dimensions of the parameter (``None``: it has none), where
    one element stands for ``output_block`` or ``input_block`` features: 8 for four-bit values
    packed in int32, 128 for the scales of groups of 128. ``per_part``: the parameter is ``[parts]``
    and each fused matrix brings one scalar. ``stack`` > 0: the first dimension counts matrices
    (experts) that come one by one. A parameter that the checkpoint lacks is filled with
    ``default``, and is an error without one. ``outputs`` and ``inputs`` are set by the layer.
    """

    output_dim: int | None = None
    input_dim: int | None = None
    output_block: int = 1
    input_block: int = 1
    per_part: bool = False
    stack: int = 0
    default: float | None = None
    outputs: tuple[Shard, ...] = ()
    inputs: Shard | None = None


class WeightTarget(NamedTuple):
    """Where one checkpoint tensor goes; ``None`` stands for all of them."""

    parameter: str
    part: int | None = None
    item: int | None = None
    """Index in the stack."""


@runtime_checkable
class SupportsWeightLookup(Protocol):
    """A module that finds its own checkpoint tensors, because no list of names could (experts)."""

    def locate(self, rest: str) -> WeightTarget | None:
        """The slot of the tensor whose name is ``rest`` below this module; ``None``: unknown.

        ``WeightTarget.parameter`` is the name of a parameter of this module.
        """


@runtime_checkable
class SupportsPostLoad(Protocol):
    """A module that repacks or converts its parameters when all of them are filled."""

    def process_weights_after_loading(self) -> None: ...


@runtime_checkable
class Quantizable(Protocol):
    """A module with a weight that a quantization scheme may store in fewer bits."""

    def quantizable(self) -> Iterable[Tensor]:
        """The parameters that are not quantized yet."""


@runtime_checkable
class Sharded(Protocol):
    """A linear layer of which this rank holds a share, by the matrices of the checkpoint."""

    inputs: Shard
    outputs: tuple[Shard, ...]


class WeightMismatchError(ValueError):
    """A checkpoint tensor does not fit a parameter; the message says what does."""


def empty_weight(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    output_dim: int | None = None,
    input_dim: int | None = None,
    output_block: int = 1,
    input_block: int = 1,
    per_part: bool = False,
    stack: int = 0,
    default: float | None = None,
) -> nn.Parameter:
    """An empty parameter on the current default device, with its ``Layout``.

    ``shape`` is what this rank holds, in elements. The dimensions of ``output_dim`` and
    ``input_dim`` do not count a leading stack dimension.
    """
    parameter = nn.Parameter(torch.empty(tuple(shape), dtype=dtype), requires_grad=False)
    layout = Layout(output_dim, input_dim, output_block, input_block, per_part, stack, default)
    parameter.treadle_layout = layout  # type: ignore[attr-defined]
    return parameter


def layout_of(parameter: Tensor) -> Layout:
    """The layout of a parameter; one that was made without ``empty_weight`` is filled whole."""
    layout = getattr(parameter, "treadle_layout", None)
    return layout if isinstance(layout, Layout) else Layout()


def set_shards(
    parameters: Iterable[Tensor], outputs: Sequence[Shard], inputs: Shard | None
) -> None:
    """Tell parameters which features of the checkpoint this rank holds."""
    for parameter in parameters:
        parameter.treadle_layout = replace(  # type: ignore[attr-defined]
            layout_of(parameter), outputs=tuple(outputs), inputs=inputs
        )


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


def _blocks(features: int, block: int) -> int:
    return -(-features // block)


def _first_block(shard: Shard, block: int) -> int:
    ends_inside = shard.start + shard.size < shard.total and shard.size % block
    if shard.start % block or ends_inside:
        raise WeightMismatchError(
            f"this rank's features {shard.start} to {shard.start + shard.size} of {shard.total} cut "
            f"through blocks of {block}; use a smaller tensor_parallel_size"
        )
    return shard.start // block
