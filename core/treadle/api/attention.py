"""The interface of attention backends and kernel ops."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from treadle.api.cache import DeviceInfo, KVCacheSpec

if TYPE_CHECKING:
    from torch import Tensor

__all__ = (
    "AttentionBackend",
    "AttentionOffer",
    "AttentionRequest",
    "CommonAttentionMetadata",
    "ForwardContext",
    "KernelOffer",
    "KernelRequest",
    "MaskKind",
    "Refusal",
    "SupportsExternalKVWrite",
    "SupportsOutputBuffer",
)


class MaskKind(enum.Enum):
    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"
    SLIDING = "sliding"
    PREFIX = "prefix"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class AttentionRequest:
    """What an attention group needs of a backend. ``num_heads`` and ``num_kv_heads`` are those of a rank.

    ``window`` counts the tokens that a token attends to, itself too. ``page_size`` may be ``None``.
    """

    device: DeviceInfo
    dtype: str
    kv_dtype: str
    head_size: int
    num_heads: int
    num_kv_heads: int
    scale: float
    page_size: int | None = None
    mask: MaskKind = MaskKind.CAUSAL
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False

    def invalid_reasons(self) -> list[str]:
        """Return why no backend can support the request, as reasons for a ``Refusal``."""
        heads, kv_heads, mask, window = self.num_heads, self.num_kv_heads, self.mask, self.window
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
        return [reason for is_valid, reason in checks if not is_valid]


@dataclass(slots=True)
class CommonAttentionMetadata:
    """The rows of a step, for the layers of one KV cache group.

    Row ``r`` has ``query_lens[r]`` new tokens and, including them, ``kv_lens[r]`` tokens in the cache; its queries
    are at the last ``query_lens[r]`` positions. Tokens of all rows are packed: row ``r`` has tokens
    ``[query_start[r], query_start[r + 1])``. The first ``num_decodes`` rows have exactly one token each. The CPU-side
    lists are valid during the step only. CUDA graphs are replayed without them: a ``graph_safe`` backend reads only
    the device tensors and the three ``max_``/``num_`` bounds in ``forward``.
    """

    page_size: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor  # int32 [rows + 1], device
    seq_lens: Tensor  # int32 [rows], device
    page_table: Tensor  # int32 [rows, pages], device; may have more columns than needed
    slot_mapping: Tensor  # int64 [tokens], device: page · page_size + offset of each new token
    query_lens_cpu: Sequence[int]
    seq_lens_cpu: Sequence[int]


@dataclass(slots=True)
class ForwardContext:
    """Forward context that a model passes to its layers: metadata for each attention group."""

    attn_metadata: Sequence[Any]
    logits_indices: Tensor | None = None
    """int64 ``[rows]``: the tokens with logits; ``None`` if all. A model may return the hidden
    states of these only, as the layers after the last attention do not need the others."""
    attend: Callable[..., Tensor] | None = None
    """Called by each attention layer with itself, ``q``, ``k`` and ``v`` in place of its backend, while a
    step is captured in pieces between which the backends run."""


class AttentionBackend(Protocol):
    """Writes keys and values to the paged cache and computes attention."""

    def kv_cache_shape(self, pages: int, page_size: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """Return the shape of a layer's cache. Its element type is ``spec.dtype``."""

    def build_metadata(self, batch: CommonAttentionMetadata) -> Any:
        """Return the attention metadata of a step. Called once per group, before the layers."""

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: Any,
        scales: tuple[float, float] = ...,
    ) -> Tensor:
        """Write ``k`` and ``v`` to the cache and return the attention output.

        ``q`` is ``[tokens, heads, head_size]``, ``k`` and ``v`` are ``[tokens, kv_heads, head_size]``, or ``None`` if
        they are in the cache already. The result has the shape and dtype of ``q``. ``scales`` (of keys, of values;
        default 1) is only passed for fp8 caches and is constant for a cache: store ``k / scales[0]`` and ``v /
        scales[1]``, saturated. A backend that cannot do this must refuse fp8. With ``AttentionRequest.sinks`` it also
        gets the keyword ``sinks``, float32 ``[heads]``: one more logit of each softmax, without a value.
        """


@runtime_checkable
class SupportsExternalKVWrite(Protocol):
    """Optional protocol of a backend: kernels outside it may write keys and values to its cache.

    The cache is then ``[2, pages, page_size, kv_heads, head_size]``: keys, then values.
    """

    def slot_mapping(self, plan: Any) -> Tensor:
        """Return the slot mapping, int64 ``[tokens]``: page · page_size + offset of each token."""


@runtime_checkable
class SupportsOutputBuffer(Protocol):
    """Optional protocol of a backend: its caller says where the result is to lie."""

    def forward_into(self, out: Tensor, *arguments: Any, **named: Any) -> None:
        """Do what ``forward`` does, with the result in ``out``, contiguous, of the shape and dtype of ``q``."""


@dataclass(frozen=True, slots=True)
class AttentionOffer:
    """A backend's offer to serve a request. ``score``: 0 (reference) to 100 (best known)."""

    name: str
    score: int
    create: Callable[[], AttentionBackend]
    page_sizes: tuple[int, ...] = (16,)
    """Supported page sizes, the preferred one first."""
    graph_safe: bool = False
    """Whether it can be captured in a CUDA graph and replayed with other lengths."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A backend's refusal of a request, with all reasons."""

    name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What a kernel op needs of a kernel. ``shape`` maps names of dimensions to sizes.

    The operations are declared in ``treadle_layers_kit.kernel_ops`` and ``treadle.testing.kernel_ops``.
    """

    device: DeviceInfo
    dtype: str
    shape: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KernelOffer:
    """An implementation of a kernel op. ``load`` imports and returns the callable."""

    name: str
    score: int
    load: Callable[[], Callable[..., Any]]
