"""One linear layer from packed tensors, filled by the loader as in a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from treadle.api.communicators import Communicator
from treadle.api.models import ModelContext, ModelSpec, QuantizationScheme, SupportsWeightRenaming
from treadle.layers import Linear, SingleRankCommunicator
from treadle.loading.weights import load_weights
from treadle.testing.packing import Format

__all__ = ("Layer", "fill", "pack")

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
        made = torch.Generator().manual_seed(self.inputs)
        return {
            name: torch.randn(size, self.inputs, generator=made) * (0.02 + 0.03 * index)
            for index, (name, size) in enumerate(zip(self.names, self.outputs, strict=True))
        }

    def shares(self, rank: int, ranks: int) -> Tensor:
        """The outputs that one rank has: a piece of each matrix."""
        found, first = [], 0
        for size in self.outputs:
            part = size // ranks
            found.append(torch.arange(first + rank * part, first + (rank + 1) * part))
            first += size
        return torch.cat(found)


def pack(format: Format, layer: Layer) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """The checkpoint's tensors by name, the dequantized weight ``[out, in]``, the bias ``[out]``."""
    found: dict[str, Tensor] = {}
    dense: list[Tensor] = []
    biases: list[Tensor] = []
    for name, weight in layer.weights().items():
        packed = format.pack(weight)
        found.update({f"{HOME}.{name}.{part}": t for part, t in packed.tensors.items()})
        dense.append(packed.weight)
        if layer.bias:
            biases.append(torch.linspace(-1.0, 1.0, len(weight)))
            found[f"{HOME}.{name}.bias"] = biases[-1]
    return found, torch.cat(dense), torch.cat(biases) if biases else None


def fill(
    scheme: QuantizationScheme,
    layer: Layer,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    tp_group: Communicator | None = None,
    device: str = "cpu",
) -> Linear:
    """The layer of one rank, with the tensors of ``pack``. Raises what loading raises."""
    tp_group = tp_group or SingleRankCommunicator()
    ctx: Any = ModelContext(None, dtype, torch.device(device), tp_group, scheme, _no_attention)
    with torch.device(device):
        built = Linear(
            ctx,
            f"{HOME}.fused",
            layer.inputs,
            layer.outputs,
            bias=layer.bias,
            split=layer.split,
            names=layer.names,
        )
    root: nn.Module = built
    for part in reversed(f"{HOME}.fused".split(".")):
        outer = nn.Module()
        outer.add_module(part, root)
        root = outer
    spec = ModelSpec("layer", _no_attention, packed_modules_mapping={"fused": layer.names})
    rename = scheme.rename if isinstance(scheme, SupportsWeightRenaming) else None
    load_weights(root, spec, _Tensors(tensors), tp_group, rename=rename)
    return built


def _no_attention(*arguments: object) -> Any:
    raise NotImplementedError("a linear layer needs none")


class _Tensors:
    """A ``WeightLoader`` of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        yield from ((n, t) for n, t in self._tensors.items() if wanted(n))
