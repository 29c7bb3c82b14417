"""The ranks of a model that runs alone, and how work is divided among several."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from treadle.api.models import Collective, Shared
from treadle.errors import ConfigError
from treadle.layers.weight import Part

__all__ = ("NullCollective", "divide", "divide_heads")


class NullCollective:
    """One rank: every operation returns its argument."""

    rank = 0
    size = 1
    sum_limit = 0
    shared = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def smallest(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def share(self, limit: int, units: int) -> Shared | None:
        return None


def divide(ranks: Collective, features: int, what: str) -> Part:
    """This rank's equal share of ``features``. Raises ``ConfigError`` if they cannot be divided."""
    if features % ranks.size:
        raise ConfigError(
            f"{what} has {features} features, which {ranks.size} ranks cannot share equally; "
            "choose a tensor_parallel_size that divides it"
        )
    size = features // ranks.size
    return Part(full=features, start=ranks.rank * size, size=size)


def divide_heads(ranks: Collective, heads: int, kv_heads: int, head_size: int) -> tuple[Part, Part]:
    """This rank's query heads and the key/value heads that serve them, both counted in features.

    With fewer key/value heads than ranks, several ranks hold a copy of the same head.
    Raises ``ConfigError`` if the heads cannot be divided.
    """
    whole = max(kv_heads, ranks.size) % min(kv_heads, ranks.size) == 0
    if heads % ranks.size or not whole or heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads and {kv_heads} key/value heads cannot be shared by {ranks.size} "
            "ranks; choose a tensor_parallel_size that divides the query heads and divides, or is a "
            "multiple of, the key/value heads"
        )
    own = heads // ranks.size
    own_kv = max(1, kv_heads // ranks.size)
    first_kv = ranks.rank * kv_heads // ranks.size
    return (
        Part(heads * head_size, ranks.rank * own * head_size, own * head_size),
        Part(kv_heads * head_size, first_kv * head_size, own_kv * head_size),
    )
