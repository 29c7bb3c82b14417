"""The contract of attention backends and of replaceable kernels."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from treadle.api.cache import DeviceInfo, LayerCacheSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = (
    "AttentionBackend",
    "AttentionBatch",
    "AttentionRequest",
    "KernelOffer",
    "KernelRequest",
    "MaskKind",
    "Offer",
    "PagedWriter",
    "Refusal",
    "Step",
)


class MaskKind(enum.Enum):
    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"
    SLIDING = "sliding"
    PREFIX = "prefix"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """What one group of attention layers needs. ``heads`` are counted after sharding.

    ``window`` is the number of tokens that a token sees, itself included. ``page_size`` is in
    tokens; ``None`` leaves the choice to the backend.
    """

    device: DeviceInfo
    dtype: str
    kv_dtype: str
    head_size: int
    heads: int
    kv_heads: int
    scale: float
    page_size: int | None = None
    mask: MaskKind = MaskKind.CAUSAL
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False

    def contradictions(self) -> list[str]:
        """What no backend can serve, in words for a ``Refusal``."""
        heads, kv_heads, mask, window = self.heads, self.kv_heads, self.mask, self.window
        checks = (
            (
                kv_heads > 0 and heads % kv_heads == 0,
                f"{heads} query heads cannot share {kv_heads} key/value heads evenly",
            ),
            (mask is not MaskKind.SLIDING or window is not None, "a sliding mask needs a window"),
            (
                mask is not MaskKind.BIDIRECTIONAL or window is None,
                "a window on a bidirectional mask is not supported",
            ),
            (window is None or window > 0, f"window {window} is not positive"),
        )
        return [why for good, why in checks if not good]


@dataclass(slots=True)
class AttentionBatch:
    """One step as attention sees it, for one group of layers that share page tables.

    Row ``r`` brings ``query_lens[r]`` new tokens and has ``kv_lens[r]`` tokens in the cache once
    they are written; its queries are the last ``query_lens[r]`` of those positions. Tokens of all
    rows are packed: row ``r`` owns ``[query_start[r], query_start[r + 1])``. The first
    ``num_decodes`` rows have exactly one token each. The host copies are Python lists, valid for
    the step only; a captured graph replays without them, so a backend that says ``graph_safe``
    reads only the device tensors and the three ``max_``/``num_`` bounds during ``forward``.
    """

    page_size: int
    num_decodes: int
    max_query_len: int
    max_kv_len: int
    query_start: Tensor  # int32 [rows + 1], device
    kv_lens: Tensor  # int32 [rows], device
    page_table: Tensor  # int32 [rows, pages], device; rows may be wider than they need
    slot_mapping: Tensor  # int64 [tokens], device: page · page_size + offset of each new token
    query_lens_host: Sequence[int]
    kv_lens_host: Sequence[int]


@dataclass(slots=True)
class Step:
    """What a model hands to its attention layers: one backend plan for each group of layers."""

    plans: Sequence[Any]
    wanted: Tensor | None = None
    """int64 ``[rows]``: the tokens whose hidden states are asked for; ``None``: all of them. A model
    may return these rows only, for no other token needs what follows the last attention."""


class AttentionBackend(Protocol):
    """Writes new keys and values into pages and attends over them."""

    def cache_shape(self, pages: int, page_size: int, spec: LayerCacheSpec) -> tuple[int, ...]:
        """The shape of one layer's cache; its element type is ``spec.dtype``."""

    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare one step; called once per group of layers, before the layers run."""

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        plan: Any,
        scales: tuple[float, float] = ...,
    ) -> Tensor:
        """Write ``k`` and ``v`` (unless ``None``: already written), return the attention output.

        ``q`` is ``[tokens, heads, head_size]``, ``k`` and ``v`` ``[tokens, kv_heads, head_size]``;
        the result has the shape and dtype of ``q``. ``scales`` (of keys, of values; 1 unless given)
        is passed for caches in fp8 only, and is the same for every call with that cache: what is
        stored is ``k / scales[0]`` and ``v / scales[1]``, cut off at the largest number of the
        type. A backend that cannot do that refuses fp8.
        """


@runtime_checkable
class PagedWriter(Protocol):
    """An optional ability of a backend: others may write keys and values into its cache.

    The cache is then ``[2, pages, page_size, kv_heads, head_size]``: keys, then values.
    """

    def slots(self, plan: Any) -> Tensor:
        """int64 ``[tokens]``: page · page_size + offset of each new token of a planned step."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A backend that can serve the request, and how well (0 reference … 100 best known)."""

    name: str
    score: int
    create: Callable[[], AttentionBackend]
    page_sizes: tuple[int, ...] = (16,)
    """Page sizes it supports, the preferred one first."""
    graph_safe: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A backend that cannot serve the request, and every reason why."""

    name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What one operation of the layers needs; ``shape`` names its sizes.

    The operations are declared in ``treadle.layers.kernel_ops`` and ``treadle.sampling.kernels``.
    """

    device: DeviceInfo
    dtype: str
    shape: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KernelOffer:
    """An implementation of one operation; ``load`` imports and returns the callable."""

    name: str
    score: int
    load: Callable[[], Callable[..., Any]]
