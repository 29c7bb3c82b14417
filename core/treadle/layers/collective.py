"""The communicator of a model on one device, and how work is divided among several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from treadle.api.communicators import Communicator
from treadle.errors import ConfigError
from treadle.layers.weight import Part

__all__ = ("SingleRankCommunicator", "divide", "divide_heads")


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


def divide(ranks: Communicator, features: int, what: str) -> Part:
    """This rank's equal share of ``features``. Raises ``ConfigError`` if they cannot be divided."""
    if features % ranks.world_size:
        raise ConfigError(
            f"{what} has {features} features, which {ranks.world_size} ranks cannot share equally; "
            "choose a tensor_parallel_size that divides it"
        )
    size = features // ranks.world_size
    return Part(full=features, start=ranks.rank * size, size=size)


def divide_heads(
    ranks: Communicator, heads: int, kv_heads: int, head_size: int
) -> tuple[Part, Part]:
    """This rank's query heads and the key/value heads that serve them, both counted in features.

    With fewer key/value heads than ranks, several ranks hold a copy of the same head.
    Raises ``ConfigError`` if the heads cannot be divided.
    """
    whole = max(kv_heads, ranks.world_size) % min(kv_heads, ranks.world_size) == 0
    if heads % ranks.world_size or not whole or heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads and {kv_heads} key/value heads cannot be shared by {ranks.world_size} "
            "ranks; choose a tensor_parallel_size that divides the query heads and divides, or is a "
            "multiple of, the key/value heads"
        )
    own = heads // ranks.world_size
    own_kv = max(1, kv_heads // ranks.world_size)
    first_kv = ranks.rank * kv_heads // ranks.world_size
    return (
        Part(heads * head_size, ranks.rank * own * head_size, own * head_size),
        Part(kv_heads * head_size, first_kv * head_size, own_kv * head_size),
    )
