"""The backend: XQA decodes, FlashAttention 3 or 2 does the rest, both over pages as they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import xqa_batch_decode_with_kv_cache
from torch import Tensor

from treadle.api.types import AttentionRequest, CommonAttentionMetadata
from treadle_attention_flashinfer.page_indices import build_page_indices, windowed_page_table
from treadle_paged_attention_kit.backend import PagedAttentionBackend
from treadle_paged_attention_kit.cache import write_kv

__all__ = ("FlashInferAttention", "FlashInferMetadata")

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

_XQA_WORKSPACE = 32 << 20
"""Bytes: 8 MiB of semaphores, as FlashInfer divides it, and partial results of at most one program
on each processor."""

_FA2_WORKSPACE = 128 << 20
"""Bytes for partial results of keys that are split, as FlashInfer recommends. FlashAttention 3 does
not split them, but wants a workspace."""


@dataclass(slots=True)
class DecodeBatch:
    """The first rows, of one new token each, as XQA reads them."""

    rows: int
    page_table: Tensor  # int32 [rows, columns], contiguous
    kv_lens: Tensor  # int32 [rows]


@dataclass(slots=True)
class FlashInferMetadata:
    """One step. Only the last one with a ``prefill_slice`` can be run: its rows are planned in the wrapper."""

    batch: CommonAttentionMetadata
    decodes: DecodeBatch | None = None
    prefill_slice: slice | None = None  # tokens of the rows that the wrapper serves


class FlashInferAttention(PagedAttentionBackend):
    """Serves one :class:`AttentionRequest`. Cache: ``[2, pages, page_size, kv_heads, head_size]``,
    whose halves are FlashInfer's layout NHD.

    With ``xqa`` a plan of decode rows only is graph-safe: lengths and page tables are read on the
    device, and the number of programs follows from the number of rows and the width of the page
    table. Without it, rows of one token are planned on the host like prompts.
    """

    def __init__(self, request: AttentionRequest, *, xqa: bool) -> None:
        super().__init__(request)
        self.dtype: torch.dtype = getattr(torch, request.dtype)
        self.kv_dtype = _FP8.get(request.kv_dtype, self.dtype)
        self.device = torch.device(request.device.type)
        self.xqa = self._zeros(_XQA_WORKSPACE) if xqa else None
        capability = request.device.capability or (0, 0)
        # FlashAttention 3 is Hopper's alone, and reads an fp8 cache with fp8 queries only.
        fa3 = capability[0] == 9 and self.kv_dtype == self.dtype
        self.wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(
            self._zeros(1 << 20 if fa3 else _FA2_WORKSPACE), "NHD", backend="fa3" if fa3 else "fa2"
        )
        self.plan_copied = torch.cuda.Event()

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def build_metadata(self, batch: CommonAttentionMetadata) -> FlashInferMetadata:
        metadata = FlashInferMetadata(batch)
        decodes = batch.num_decodes if self.xqa is not None else 0
        if decodes:
            table, lengths = batch.page_table[:decodes], batch.seq_lens[:decodes]
            if self.window is not None:
                table, lengths = windowed_page_table(table, lengths, batch.page_size, self.window)
            metadata.decodes = DecodeBatch(decodes, table.contiguous(), lengths)
        if decodes < len(batch.query_lens_cpu):
            self._plan_prefill(batch, decodes)
            metadata.prefill_slice = slice(decodes, sum(batch.query_lens_cpu))
        return metadata

    def _plan_prefill(self, batch: CommonAttentionMetadata, first: int) -> None:
        table = batch.page_table[first:]
        pages = build_page_indices(
            batch.query_lens_cpu[first:],
            batch.seq_lens_cpu[first:],
            batch.page_size,
            table.shape[1],
            self.window,
            pinned=table.is_cuda,
        )
        entries = pages.table_indices.to(self.device, non_blocking=True)
        # The wrapper copies its plan from one pinned buffer of its own, which the device may still
        # be reading: it is done once the step before has begun.
        self.plan_copied.synchronize()
        self.wrapper.plan(
            pages.qo_indptr,
            pages.kv_indptr,
            table.reshape(-1).index_select(0, entries),
            pages.last_page_len,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            batch.page_size,
            causal=self.causal,
            sm_scale=self.scale,
            window_left=-1 if self.window is None else self.window - 1,
            logits_soft_cap=self.softcap,
            q_data_type=self.dtype,
            kv_data_type=self.kv_dtype,
            seq_lens=pages.kv_lens,
        )
        self.plan_copied.record()

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: FlashInferMetadata,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        if k is not None and v is not None:
            write_kv(cache, k, v, metadata.batch.slot_mapping, scales)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kv_caches = cache[0], cache[1]
        if metadata.decodes is not None and self.xqa is not None:
            rows = metadata.decodes.rows
            table, lengths = metadata.decodes.page_table, metadata.decodes.kv_lens
            xqa_batch_decode_with_kv_cache(
                q[:rows].contiguous(),
                kv_caches,
                self.xqa,
                table,
                lengths,
                table.shape[1] * metadata.batch.page_size,
                bmm1_scale=self.scale * scales[0],
                bmm2_scale=scales[1],
                window_left=-1 if self.window is None else self.window - 1,
                out=out[:rows],
            )
        if metadata.prefill_slice is not None:
            self.wrapper.run(
                q[metadata.prefill_slice],
                kv_caches,
                k_scale=scales[0],
                v_scale=scales[1],
                out=out[metadata.prefill_slice],
            )
        return out
