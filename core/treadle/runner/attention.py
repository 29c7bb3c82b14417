"""The groups of a model's attention layers, and the metadata of a step for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from treadle.api.attention import (
    AttentionBackend,
    AttentionRequest,
    CommonAttentionMetadata,
    ForwardContext,
)

__all__ = ("AttentionGroup", "build_metadata")


@dataclass(slots=True)
class AttentionGroup:
    """Layers with the same request, which share a backend and its metadata."""

    request: AttentionRequest
    backend: AttentionBackend
    cache_group: int
    graph_safe: bool
    name: str


def build_metadata(
    groups: Sequence[AttentionGroup],
    batches: Sequence[CommonAttentionMetadata],
    logits_indices: Tensor | None = None,
) -> ForwardContext:
    """Return the forward context of a step. ``batches`` are by KV cache group."""
    metadata = [g.backend.build_metadata(batches[g.cache_group]) for g in groups]
    return ForwardContext(metadata, logits_indices)
