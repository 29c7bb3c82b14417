"""The communicator of a model on one device, and how work is divided among several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from treadle.api.communicators import Communicator, SupportsDryRun
from treadle.errors import ConfigError
from treadle_layers_kit.weight import Shard

__all__ = ("SingleRankCommunicator", "dry_run", "shard_features", "shard_heads")


class SingleRankCommunicator:
    """One rank: every operation returns its argument."""

    rank = 0
    world_size = 1
    memory_bytes = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        return list(values)


@contextmanager
def dry_run(communicator: Communicator) -> Iterator[bool]:
    """Let this rank compile what it is about to run, without meeting the others.

    Yields whether the communicator can (``SupportsDryRun``); if not, there is nothing to do inside.
    """
    if not isinstance(communicator, SupportsDryRun):
        yield False
        return
    communicator.set_dry_run(True)
    try:
        yield True
    finally:
        communicator.set_dry_run(False)


def shard_features(tp_group: Communicator, features: int, what: str) -> Shard:
    """This rank's equal share of ``features``. Raises ``ConfigError`` if they cannot be divided."""
    if features % tp_group.world_size:
        raise ConfigError(
            f"{what} has {features} features, which {tp_group.world_size} ranks cannot share equally; "
            "choose a tensor_parallel_size that divides it"
        )
    size = features // tp_group.world_size
    return Shard(total=features, start=tp_group.rank * size, size=size)


def shard_heads(
    tp_group: Communicator, heads: int, kv_heads: int, head_size: int
) -> tuple[Shard, Shard]:
    """This rank's query heads and the key/value heads that serve them, both counted in features.

    With fewer key/value heads than ranks, several ranks hold a copy of the same head.
    Raises ``ConfigError`` if the heads cannot be divided.
    """
    is_divisible = max(kv_heads, tp_group.world_size) % min(kv_heads, tp_group.world_size) == 0
    if heads % tp_group.world_size or not is_divisible or heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads and {kv_heads} key/value heads cannot be shared by {tp_group.world_size} "
            "ranks; choose a tensor_parallel_size that divides the query heads and divides, or is a "
            "multiple of, the key/value heads"
        )
    num_heads = heads // tp_group.world_size
    num_kv_heads = max(1, kv_heads // tp_group.world_size)
    first_kv = tp_group.rank * kv_heads // tp_group.world_size
    return (
        Shard(heads * head_size, tp_group.rank * num_heads * head_size, num_heads * head_size),
        Shard(kv_heads * head_size, first_kv * head_size, num_kv_heads * head_size),
    )
