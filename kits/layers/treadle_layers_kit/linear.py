"""Linear layers that know their tensor-parallel split and leave the arithmetic to a method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from treadle.api.models import LinearMethod, LinearSpec, ModelContext
from treadle_layers_kit.collective import shard_features, shard_heads
from treadle_layers_kit.fusion import Site
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.plain import PlainLinear
from treadle_layers_kit.weight import Shard, empty_weight, set_shards

__all__ = ("Linear", "QKVLinear")


class Linear(nn.Module):
    """``[..., in_features] -> [..., out_features]``, of which this rank computes a part.

    ``split="column"`` gives every rank a share of the output features, ``"row"`` a share of the
    input features, with a sum over the ranks at the end; ``None`` replicates the layer. Several
    ``out_features`` make one layer of several checkpoint matrices, whose last path components are
    ``names``; the output holds them one after the other. A ``Shard`` in place of a number says what
    this rank holds. ``method`` ``None`` asks the checkpoint's quantization scheme. Raises ``ConfigError`` when the ranks cannot share the features equally.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        in_features: int,
        out_features: int | Sequence[int | Shard],
        *,
        bias: bool = False,
        split: Literal["column", "row"] | None = None,
        names: Sequence[str] = (),
        reduce: bool = True,
        dtype: torch.dtype | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.tp_group = ctx.tp_group
        sizes = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.outputs = tuple(self._output(size, split) for size in sizes)
        self.inputs = (
            shard_features(ctx.tp_group, in_features, prefix)
            if split == "row"
            else Shard.full(in_features)
        )
        self.reduce_results = split == "row" and reduce and ctx.tp_group.world_size > 1
        self.dtype = dtype or ctx.dtype
        self.out_features = sum(shard.size for shard in self.outputs)
        """Output features on this rank."""
        parent, _, last = prefix.rpartition(".")
        paths = tuple(f"{parent}.{name}" if parent else name for name in names or (last,))
        self._create(ctx, paths, bias, method)
        # The ranks' results are summed, so only one of them may hold the bias.
        self.applies_bias = bias and (split != "row" or ctx.tp_group.rank == 0)

    def _output(self, size: int | Shard, split: str | None) -> Shard:
        if isinstance(size, Shard):
            return size
        return (
            shard_features(self.tp_group, size, self.prefix)
            if split == "column"
            else Shard.full(size)
        )

    def _create(
        self, ctx: ModelContext, paths: tuple[str, ...], bias: bool, method: LinearMethod | None
    ) -> None:
        spec = LinearSpec(
            prefix=self.prefix,
            names=paths,
            in_features=self.inputs.size,
            out_features=tuple(shard.size for shard in self.outputs),
            bias=bias,
            dtype=self.dtype,
        )
        if method is None and ctx.quantization is not None:
            method = ctx.quantization.linear_method(spec)
        self.method: LinearMethod = method or PlainLinear()
        self.method.create_weights(self, spec)
        if bias:
            self.bias: Tensor | None = empty_weight(
                [sum(spec.out_features)], spec.dtype, output_dim=0
            )
        else:
            self.bias = None
        set_shards(self.parameters(recurse=False), self.outputs, self.inputs)

    def process_weights_after_loading(self) -> None:
        """Called once by the loader, when all parameters are filled."""
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.method.apply(self, x, self.bias if self.applies_bias else None)
        return self.tp_group.all_reduce(y) if self.reduce_results else y

    def gated(self, x: Tensor) -> Tensor:
        """The layer of ``ops.silu_and_mul(x)``, for a ``SupportsGatedInput`` method: ``[..., 2 · in] -> [..., out]``."""
        y = self.method.apply_gated(self, x, self.bias if self.applies_bias else None)  # type: ignore[attr-defined]
        return self.tp_group.all_reduce(y) if self.reduce_results else y

    @property
    def sizes(self) -> Mapping[str, int]:
        """This rank's, for the request of a kernel."""
        return {"in_features": self.inputs.size, "out_features": self.out_features}

    @property
    def packed_weight(self) -> PackedInt4 | PackedWeight | None:
        """The module that computes the whole layer; ``None`` where more than one does, or other tensors take part."""
        children = list(self.children())
        tensors = (*self._parameters.values(), *self._buffers.values())
        if not getattr(self.method, "applies_packed_alone", False) or len(children) != 1:
            return None
        if any(tensor is not None for tensor in tensors):
            return None
        return children[0] if isinstance(children[0], PackedInt4 | PackedWeight) else None

    def kernel_sites(self, path: str) -> Iterator[Site]:
        if isinstance(self.method, PlainLinear):
            yield Site(path, ("linear",), (self.sizes,), partial(setattr, self.method, "op"))

    def quantizable(self) -> Iterable[Tensor]:
        """The parameters of a layer that is not quantized."""
        return self.parameters() if isinstance(self.method, PlainLinear) else ()

    def extra_repr(self) -> str:
        shares = " + ".join(f"{p.size} of {p.total}" for p in self.outputs)
        return (
            f"{self.inputs.size} of {self.inputs.total} -> {shares}, {type(self.method).__name__}"
        )


class QKVLinear(Linear):
    """The query, key and value projections in one layer, divided by heads.

    With fewer key/value heads than ranks, ranks share copies of a head.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        *,
        bias: bool = False,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        q, kv = shard_heads(ctx.tp_group, heads, kv_heads, head_size)
        super().__init__(ctx, prefix, hidden_size, (q, kv, kv), bias=bias, names=names)
        self.head_size = head_size
        self.heads = q.size // head_size
        self.kv_heads = kv.size // head_size

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """``[tokens, hidden] -> [tokens, heads, head_size]`` thrice, views of one tensor."""
        y = super().forward(x)
        y = y.view(y.shape[0], -1, self.head_size)
        heads, kv_heads = self.heads, self.kv_heads
        return y[:, :heads], y[:, heads : heads + kv_heads], y[:, heads + kv_heads :]

    def packed(self, x: Tensor) -> Tensor:
        """``[tokens, hidden] -> [tokens, (heads + 2 · kv_heads) · head_size]``."""
        return self.method.apply(self, x, self.bias)
