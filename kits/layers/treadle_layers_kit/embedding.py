"""Token embeddings and the output head, both divided over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.communicators import Communicator
from treadle.api.models import LinearSpec, ModelContext
from treadle_layers_kit.collective_ops import (
    SharedKernels,
    collective_op_owner,
    create_collective_op,
)
from treadle_layers_kit.kernel_ops import ALL_GATHER
from treadle_layers_kit.linear import Linear
from treadle_layers_kit.plain import PlainLinear
from treadle_layers_kit.weight import Shard, empty_weight, set_shards

__all__ = ("Embedding", "LMHead")

# Shares of a vocabulary are padded to whole blocks, so that kernels meet no ragged widths.
BLOCK = 64


def shard_vocab(tp_group: Communicator, vocab_size: int) -> Shard:
    """This rank's rows of a vocabulary. One rank holds exactly the vocabulary, without padding."""
    if tp_group.world_size == 1:
        return Shard.full(vocab_size)
    shard_size = -(-vocab_size // tp_group.world_size)
    shard_size = -(-shard_size // BLOCK) * BLOCK
    return Shard(total=vocab_size, start=tp_group.rank * shard_size, size=shard_size)


class Embedding(nn.Module):
    """``[tokens]`` ids to ``[tokens, hidden_size]``. Ids must lie in ``[0, vocab_size)``."""

    def __init__(self, ctx: ModelContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tp_group = ctx.tp_group
        self.vocab_size = vocab_size
        self.rows = shard_vocab(ctx.tp_group, vocab_size)
        self.weight = empty_weight([self.rows.size, hidden_size], ctx.dtype, output_dim=0)
        set_shards([self.weight], [self.rows], None)

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp_group.world_size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.rows.start
        is_remote = (local < 0) | (local >= self.rows.size)
        x = F.embedding(local.masked_fill(is_remote, 0), self.weight)
        return self.tp_group.all_reduce(x.masked_fill(is_remote[..., None], 0))


class _Tied(PlainLinear):
    """Multiplies by the weight of an embedding.

    On a CPU the packed copy stays beside it: the head is the largest matrix of a small model, and
    reading it unpacked would cost more time than the copy costs memory.
    """

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        module.register_parameter("weight", self.weight)


class LMHead(Linear):
    """``[rows, hidden_size]`` to ``[rows, vocab_size]`` logits, all of them on every rank.

    ``tied`` shares the weight of an ``Embedding``; such a head is never quantized.
    """

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        tied: Embedding | None = None,
    ) -> None:
        method = None if tied is None else _Tied(tied)
        rows = shard_vocab(ctx.tp_group, vocab_size)
        super().__init__(ctx, prefix, hidden_size, (rows,), bias=bias, method=method)
        self.vocab_size = vocab_size
        self.device = ctx.device
        self.gather_op: Callable[[Tensor], Tensor | None] | None = None
        """``all_gather``; returns ``None`` for logits that it does not support."""

    def install_collective_ops(self, shared: SharedKernels) -> Mapping[str, str]:
        if self.tp_group.world_size == 1:
            return {}
        self.gather_op = create_collective_op(
            ALL_GATHER, self.tp_group, self.out_features, self.dtype, self.device
        )
        return collective_op_owner(ALL_GATHER, self.tp_group, self.gather_op)

    def quantizable(self) -> Iterable[Tensor]:
        """None: schemes leave the head alone."""
        return ()

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.method.apply(self, hidden, self.bias)
        if self.tp_group.world_size == 1:
            return logits
        gathered = self.gather_op(logits) if self.gather_op is not None else None
        if gathered is None:
            gathered = self.tp_group.all_gather(logits, dim=-1)
        return gathered[..., : self.vocab_size]
