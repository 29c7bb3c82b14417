"""One linear layer from packed tensors, filled by the loader as in a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from treadle.api.communicators import Communicator
from treadle.api.models import LinearSpec, ModelSpec, QuantizationScheme, SupportsWeightRenaming
from treadle.testing.packing import Format
from treadle_layers_kit import (
    Shard,
    SingleRankCommunicator,
    empty_weight,
    set_shards,
    shard_features,
)
from treadle_worker_kit.weights import load_weights

__all__ = ("Layer", "QuantizedLinear", "fill", "pack")

HOME = "model.layers.0.block"


@dataclass(frozen=True)
class Layer:
    """The sizes of a linear layer of one or more matrices, and how ranks share it."""

    inputs: int
    outputs: tuple[int, ...]
    bias: bool = False
    split: Literal["column", "row"] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The last components of the checkpoint's names."""
        return tuple(f"{name}_proj" for name in "abcdefgh"[: len(self.outputs)])

    def weights(self) -> dict[str, Tensor]:
        """float32 ``[out, in]`` by name; they differ in size, so that their scales differ too."""
        generator = torch.Generator().manual_seed(self.inputs)
        return {
            name: torch.randn(size, self.inputs, generator=generator) * (0.02 + 0.03 * index)
            for index, (name, size) in enumerate(zip(self.names, self.outputs, strict=True))
        }

    def shares(self, rank: int, ranks: int) -> Tensor:
        """The outputs that one rank has: a piece of each matrix."""
        ranges, first = [], 0
        for size in self.outputs:
            part = size // ranks
            ranges.append(torch.arange(first + rank * part, first + (rank + 1) * part))
            first += size
        return torch.cat(ranges)


class QuantizedLinear(nn.Module):
    """A linear layer of a scheme as models have them, and nothing that another layer could need.

    ``[..., in_features] -> [..., out_features]``, of which each rank has its share.
    """

    def __init__(
        self, scheme: QuantizationScheme, layer: Layer, dtype: torch.dtype, tp_group: Communicator
    ) -> None:
        super().__init__()
        self.ranks, self.dtype = tp_group, dtype
        column, row = layer.split == "column", layer.split == "row"
        self.outputs = tuple(
            shard_features(tp_group, size, HOME) if column else Shard.full(size)
            for size in layer.outputs
        )
        self.inputs = (
            shard_features(tp_group, layer.inputs, HOME) if row else Shard.full(layer.inputs)
        )
        spec = LinearSpec(
            prefix=f"{HOME}.fused",
            names=tuple(f"{HOME}.{name}" for name in layer.names),
            in_features=self.inputs.size,
            out_features=tuple(shard.size for shard in self.outputs),
            bias=layer.bias,
            dtype=dtype,
        )
        method: Any = scheme.linear_method(spec)
        self.method = method
        self.method.create_weights(self, spec)
        self.bias = (
            empty_weight([sum(spec.out_features)], dtype, output_dim=0) if layer.bias else None
        )
        set_shards(self.parameters(recurse=False), self.outputs, self.inputs)
        self._sums = row
        # The ranks' results are summed, so only one of them may add the bias.
        self._added = self.bias if not row or tp_group.rank == 0 else None

    def process_weights_after_loading(self) -> None:
        """Called once by the loader, when all parameters are filled."""
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        return self._summed(self.method.apply(self, x, self._added))

    def gated(self, x: Tensor) -> Tensor:
        """The layer of ``silu_and_mul(x)``, if the method is a ``SupportsGatedInput``."""
        return self._summed(self.method.apply_gated(self, x, self._added))

    def _summed(self, y: Tensor) -> Tensor:
        return self.ranks.all_reduce(y) if self._sums else y


def pack(format: Format, layer: Layer) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """The checkpoint's tensors by name, the dequantized weight ``[out, in]``, the bias ``[out]``."""
    tensors: dict[str, Tensor] = {}
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for name, dense_weight in layer.weights().items():
        packed = format.pack(dense_weight)
        tensors.update({f"{HOME}.{name}.{part}": t for part, t in packed.tensors.items()})
        weights.append(packed.weight)
        if layer.bias:
            biases.append(torch.linspace(-1.0, 1.0, len(dense_weight)))
            tensors[f"{HOME}.{name}.bias"] = biases[-1]
    return tensors, torch.cat(weights), torch.cat(biases) if biases else None


def fill(
    scheme: QuantizationScheme,
    layer: Layer,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    tp_group: Communicator | None = None,
    device: str = "cpu",
) -> QuantizedLinear:
    """The layer of one rank, with the tensors of ``pack``. Raises what loading raises."""
    tp_group = tp_group or SingleRankCommunicator()
    with torch.device(device):
        linear = QuantizedLinear(scheme, layer, dtype, tp_group)
    root: nn.Module = linear
    for part in reversed(f"{HOME}.fused".split(".")):
        outer = nn.Module()
        outer.add_module(part, root)
        root = outer
    spec = ModelSpec("layer", _no_model, packed_modules_mapping={"fused": layer.names})
    rename = scheme.rename if isinstance(scheme, SupportsWeightRenaming) else None
    load_weights(root, spec, _Tensors(tensors), tp_group, rename=rename)
    return linear


def _no_model(*arguments: object) -> Any:
    raise NotImplementedError("a layer alone is no model")


class _Tensors:
    """A ``WeightLoader`` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        yield from ((n, t) for n, t in self._tensors.items() if should_load(n))

    def file_of(self, name: str) -> str:
        return "model.safetensors"
