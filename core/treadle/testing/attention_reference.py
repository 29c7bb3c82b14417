"""Attention written to be obviously right, the yardstick for every attention backend.

One loop over the sequences, one dense mask, float32 arithmetic. Nothing here is fast, and nothing
here may be shared with a real backend: a mistake that both made would not be seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from treadle.api.attention import (
    AttentionRequest,
    CommonAttentionMetadata,
    ForwardContext,
    MaskKind,
)
from treadle.api.cache import KVCacheSpec

__all__ = ("ReferenceBackend", "attend", "batch_of", "reference_step")


def attend(
    q: Tensor,  # [queries, heads, head_size]
    k: Tensor,  # [keys, kv_heads, head_size]
    v: Tensor,  # [keys, kv_heads, head_size]
    *,
    scale: float,
    mask: MaskKind = MaskKind.CAUSAL,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:  # [queries, heads, head_size]
    """Attend over one sequence; the queries are the last positions of the keys.

    ``window`` counts the tokens that a query sees, itself included. A sink is one more logit of
    each head that takes its share of the softmax and brings no value.
    """
    queries, heads, _ = q.shape
    keys, kv_heads, _ = k.shape
    if mask not in (MaskKind.CAUSAL, MaskKind.SLIDING, MaskKind.BIDIRECTIONAL):
        raise NotImplementedError(f"the reference has no mask {mask}")
    k = k.repeat_interleave(heads // kv_heads, dim=1).float()
    v = v.repeat_interleave(heads // kv_heads, dim=1).float()
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_positions = torch.arange(keys - queries, keys, device=q.device)[:, None]
    key_positions = torch.arange(keys, device=q.device)[None, :]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if mask is not MaskKind.BIDIRECTIONAL:
        visible &= key_positions <= query_positions
    if window is not None:
        visible &= key_positions > query_positions - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(heads, queries, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


class ReferenceBackend:
    """A complete ``AttentionBackend``: paged cache ``[2, pages, page_size, kv_heads, head_size]``."""

    def __init__(self, request: AttentionRequest) -> None:
        self.request = request

    def kv_cache_shape(self, pages: int, page_size: int, spec: KVCacheSpec) -> tuple[int, ...]:
        return (2, pages, page_size, spec.num_kv_heads, spec.head_size)

    def build_metadata(self, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return batch

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: CommonAttentionMetadata,
        scales: tuple[float, float] = (1.0, 1.0),
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        size = metadata.page_size
        if k is not None and v is not None:
            for token, slot in enumerate(metadata.slot_mapping.tolist()):
                for half, new, scale in zip(cache, (k, v), scales, strict=True):
                    half[slot // size, slot % size] = _stored(new[token], scale, cache.dtype)
        out = torch.empty_like(q)
        for row, length in enumerate(metadata.seq_lens_cpu):
            start, end = metadata.query_start_loc[row : row + 2].tolist()
            pages = metadata.page_table[row, : -(-length // size)].long()
            keys, values = (
                (half[pages].flatten(0, 1)[:length].float() * scale).to(q.dtype)
                for half, scale in zip(cache, scales, strict=True)
            )
            out[start:end] = attend(
                q[start:end],
                keys,
                values,
                scale=self.request.scale,
                mask=self.request.mask,
                window=self.request.window,
                softcap=self.request.softcap,
                sinks=sinks,
            )
        return out


def _stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def batch_of(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    page_size: int = 16,
    device: str | torch.device = "cpu",
    shuffle: int | None = None,
    spare_columns: int = 0,
) -> tuple[CommonAttentionMetadata, int]:
    """A batch whose rows own pages of their own, and the number of pages it needs.

    Pages are numbered in row order from 1 (page 0 stays unused), or shuffled by the seed
    ``shuffle``. ``spare_columns`` widens the page table with page 0.
    """
    page_counts = [-(-n // page_size) for n in kv_lens]
    numbers = list(range(1, sum(page_counts) + 1))
    if shuffle is not None:
        random.Random(shuffle).shuffle(numbers)
    width = max(page_counts, default=0) + spare_columns
    rows: list[list[int]] = []
    slots: list[int] = []
    for queries, keys, count in zip(query_lens, kv_lens, page_counts, strict=True):
        pages, numbers = numbers[:count], numbers[count:]
        rows.append(pages + [0] * (width - count))
        slots += [
            pages[p // page_size] * page_size + p % page_size for p in range(keys - queries, keys)
        ]
    start = [0]
    for queries in query_lens:
        start.append(start[-1] + queries)
    decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    batch = CommonAttentionMetadata(
        page_size=page_size,
        num_decodes=decodes,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(kv_lens, default=0),
        query_start_loc=torch.tensor(start, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(list(kv_lens), dtype=torch.int32, device=device),
        page_table=torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), width),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        query_lens_cpu=list(query_lens),
        seq_lens_cpu=list(kv_lens),
    )
    return batch, sum(page_counts) + 1


def reference_step(
    query_lens: Sequence[int], kv_lens: Sequence[int], *, page_size: int = 16, groups: int = 1
) -> tuple[ForwardContext, int]:
    """A ``ForwardContext`` for models whose layers use ``ReferenceBackend``, and the pages it needs."""
    batch, pages = batch_of(query_lens, kv_lens, page_size=page_size)
    return ForwardContext(attn_metadata=[batch] * groups), pages
