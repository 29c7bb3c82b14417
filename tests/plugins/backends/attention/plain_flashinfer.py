"""The two entry points of FlashInfer that the plugin calls, in plain torch.

They read what FlashInfer's kernels read and nothing else, a page at a time and one row after the
other, so that what the plugin plans can be checked without a GPU. A key behind a window gets a weight
of 0 and is multiplied all the same, as in the kernels: a NaN there does not stay out.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from treadle.api.attention import MaskKind
from treadle.testing.attention_reference import attend

__all__ = ("modules",)

Cache = tuple[Tensor, Tensor]


def row(
    q: Tensor, cache: Cache, pages: Tensor, length: int, *, scale: float, **options: Any
) -> Tensor:
    """One row over ``length`` tokens in ``pages`` of keys and values ``[pages, size, heads, size]``."""
    k, v = (half[pages.long()].flatten(0, 1)[:length].float() for half in cache)
    return attend(q.float(), k, v, scale=scale, **options)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, workspace: Tensor, kv_layout: str, *, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD" and backend in ("fa2", "fa3")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: Tensor,
    ) -> None:
        self.shapes = (num_qo_heads, head_dim_qk), (page_size, num_kv_heads, head_dim_qk)
        self.dtypes = q_data_type, kv_data_type
        self.queries, self.starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices = paged_kv_indices
        assert len(self.indices) == self.starts[-1]
        counts = paged_kv_indptr.diff()
        assert (counts > 0).all() and (paged_kv_last_page_len > 0).all()
        lengths = (counts - 1) * page_size + paged_kv_last_page_len
        assert torch.equal(seq_lens, lengths)
        self.lengths = lengths.tolist()
        self.scale, self.softcap = sm_scale, logits_soft_cap
        self.mask = MaskKind.CAUSAL if causal else MaskKind.BIDIRECTIONAL
        self.window = None if window_left < 0 else window_left + 1

    def run(
        self, q: Tensor, cache: Cache, *, k_scale: float, v_scale: float, out: Tensor
    ) -> Tensor:
        assert (q.shape[1:], cache[0].shape[1:]) == self.shapes
        assert (q.dtype, cache[0].dtype) == self.dtypes and len(q) == self.queries[-1]
        for r, length in enumerate(self.lengths):
            tokens = slice(self.queries[r], self.queries[r + 1])
            out[tokens] = v_scale * row(
                q[tokens],
                cache,
                self.indices[self.starts[r] : self.starts[r + 1]],
                length,
                scale=self.scale * k_scale,
                mask=self.mask,
                window=self.window,
                softcap=self.softcap,
            )
        return out


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Cache,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    *,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    out: Tensor,
) -> Tensor:
    # The kernel is told no strides of these.
    assert all(x.is_contiguous() for x in (query, block_tables, seq_lens, out))
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert len(workspace_buffer) > 8 << 20
    size = kv_cache[0].shape[1]
    assert max_seq_len == block_tables.shape[1] * size
    for r, length in enumerate(seq_lens.tolist()):
        assert 0 < length <= max_seq_len
        pages = block_tables[r, : -(-length // size)]
        window = None if window_left < 0 else window_left + 1
        result = row(query[r : r + 1], kv_cache, pages, length, scale=bmm1_scale, window=window)
        out[r] = bmm2_scale * result[0]
    return out


def modules() -> dict[str, ModuleType]:
    """By the names under which FlashInfer is imported."""
    package, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    vars(package)["BatchPrefillWithPagedKVCacheWrapper"] = BatchPrefillWithPagedKVCacheWrapper
    vars(decode)["xqa_batch_decode_with_kv_cache"] = xqa_batch_decode_with_kv_cache
    return {"flashinfer": package, "flashinfer.decode": decode}
