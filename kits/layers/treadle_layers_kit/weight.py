"""Parameters that know how a checkpoint fills them.

A layer or a quantization plugin makes its parameters with ``empty_weight`` and says which dimension
holds output features, which holds input features, and how many features one element stands for.
The layer then binds its partition to them. With both, the loader cuts the right piece out of a
checkpoint tensor and puts it into the right place, so that no plugin writes code for tensor
parallelism or for fused projections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
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
    "set_shards",
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
    packed in int32, 32/3 for three-bit ones, 128 for the scales of groups of 128. ``per_part``: the
    parameter is ``[parts]`` and each fused matrix brings one scalar. ``stack`` > 0: the first dimension
    counts matrices (experts) that come one by one. A parameter that the checkpoint lacks is filled
    with ``default``, and is an error without one. ``outputs`` and ``inputs`` are set by the layer.
    """

    output_dim: int | None = None
    input_dim: int | None = None
    output_block: int | Fraction = 1
    input_block: int | Fraction = 1
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
    output_block: int | Fraction = 1,
    input_block: int | Fraction = 1,
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
