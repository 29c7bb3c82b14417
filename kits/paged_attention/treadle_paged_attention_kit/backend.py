"""The part of an attention backend that depends on the request and the cache alone."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from treadle.api.types import AttentionRequest, CommonAttentionMetadata, KVCacheSpec, MaskKind

__all__ = ("BatchPlan", "PagedAttentionBackend")


class BatchPlan(Protocol):
    """A plan of one step, of any backend: it keeps the batch that it was made of."""

    batch: CommonAttentionMetadata


class PagedAttentionBackend:
    """A base class. The cache is ``[2, pages, page_size, kv_heads, head_size]``: keys, then values.

    With ``slot_mapping``, a subclass is a ``SupportsExternalKVWrite``: fused kernels may write keys and values.
    """

    def __init__(self, request: AttentionRequest) -> None:
        self.num_heads, self.num_kv_heads = request.num_heads, request.num_kv_heads
        self.gqa_group = request.num_heads // request.num_kv_heads
        self.head_size = request.head_size
        self.scale = request.scale
        self.causal = request.mask is not MaskKind.BIDIRECTIONAL
        self.window = request.window
        self.softcap = request.softcap

    def kv_cache_shape(self, pages: int, page_size: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """Return the shape of one layer's cache."""
        return (2, pages, page_size, spec.num_kv_heads, spec.head_size)

    def slot_mapping(self, plan: BatchPlan) -> Tensor:
        """Return the cache position of each new token: int64 ``[tokens]``."""
        return plan.batch.slot_mapping
