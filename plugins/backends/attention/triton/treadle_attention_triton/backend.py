"""The backend: plans once per step, launches two to four kernels per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treadle.api.types import AttentionRequest, CommonAttentionMetadata
from treadle_attention_triton import tiles
from treadle_attention_triton.cache_write import write_kernel
from treadle_attention_triton.decode import combine_kernel, decode_kernel
from treadle_attention_triton.hopper.prefill import (
    BLOCK_M,
    PAGE_SIZE,
    HopperPrefill,
    supports,
)
from treadle_attention_triton.prefill import prefill_kernel
from treadle_paged_attention_kit.backend import PagedAttentionBackend
from treadle_triton_kit.support import supports_pdl

__all__ = ("SplitKVBatch", "TritonAttention", "TritonMetadata", "create")

_MAX_DRAFT_TOKENS = 8
"""New tokens of a row up to which its keys are worth splitting: drafts, not prompts."""


@dataclass(slots=True)
class SplitKVBatch:
    """Rows of few new tokens, their keys split over programs. The tensors are the kernel's."""

    num_rows: int
    max_query_len: int  # the most new tokens of a row
    tile: tiles.Tile
    num_splits: int = 1
    row_indices: Tensor | None = (
        None  # int32 [num_rows], rows; None: the first ``num_rows``, one token each
    )
    partial_out: Tensor | None = (
        None  # float32 [num_rows, max_query_len, heads, num_splits, head_size]
    )
    partial_lse: Tensor | None = None  # float32 [num_rows, max_query_len, heads, num_splits]


@dataclass(slots=True)
class TritonMetadata:
    """One step. Holds every tensor that the kernels read: keep it as long as a captured graph."""

    batch: CommonAttentionMetadata
    split_batches: list[SplitKVBatch] = field(default_factory=list)
    tile: tiles.Tile | None = None  # of ``prefill_kernel``; None: Hopper's kernel does the work
    tile_list: Tensor | None = None  # int32 [tiles, 2]: row, first query; Hopper's: [tiles, 5]


class TritonAttention(PagedAttentionBackend):
    """Serves one :class:`AttentionRequest`. Cache: ``[2, pages, page_size, kv_heads, head_size]``.

    A plan of decode rows only is graph-safe: ``forward`` reads lengths, page tables and slots on
    the device, its grid depends on the number of rows and on ``max_kv_len`` alone, and a row of
    length 0 (padding) yields zeros. Lengths may change between replays up to ``max_kv_len``; beyond
    it the result is right too, only less evenly split. ``use_pdl``, from Hopper on: decode kernels
    start before the kernel ahead of them has ended. ``hopper_prefill`` serves rows that fill its tiles.
    """

    def __init__(
        self,
        request: AttentionRequest,
        num_sms: int,
        *,
        use_pdl: bool = False,
        hopper_prefill: HopperPrefill | None = None,
    ) -> None:
        super().__init__(request)
        self.head_dim_padded = tiles.next_power_of_2(request.head_size)
        self.input_precision = "ieee" if request.dtype == "float32" else "tf32"
        self.itemsize = getattr(torch, request.dtype).itemsize
        self.fp8_max = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}.get(request.kv_dtype, 0.0)
        self.num_sms = num_sms
        self.use_pdl = use_pdl
        self.hopper_prefill = hopper_prefill

    def build_metadata(self, batch: CommonAttentionMetadata) -> TritonMetadata:
        metadata = TritonMetadata(batch)
        rows: Sequence[int] = range(batch.num_decodes, len(batch.query_lens_cpu))
        if batch.num_decodes:
            metadata.split_batches.append(self._split_batch(batch.num_decodes, 1, batch))
        if rows:
            drafts = [row for row in rows if batch.query_lens_cpu[row] <= _MAX_DRAFT_TOKENS]
            if drafts and self.gqa_group * _MAX_DRAFT_TOKENS <= 64:
                split_batch = self._split_batch(len(drafts), _MAX_DRAFT_TOKENS, batch)
                if split_batch.num_splits > 1:  # else they fill the device as tiles of queries
                    split_batch.row_indices = _to_device(drafts, batch.seq_lens.device)
                    metadata.split_batches.append(split_batch)
                    rows = [row for row in rows if batch.query_lens_cpu[row] > _MAX_DRAFT_TOKENS]
        if rows:
            metadata.tile_list = _to_device(self._tile_list(metadata, rows), batch.seq_lens.device)
        return metadata

    def _split_batch(
        self, num_rows: int, max_query_len: int, batch: CommonAttentionMetadata
    ) -> SplitKVBatch:
        split_batch = SplitKVBatch(
            num_rows,
            max_query_len,
            tiles.decode_tile(
                max_query_len * self.gqa_group,
                self.head_size,
                self.itemsize,
                num_rows * self.num_kv_heads,
                self.fp8_max > 0,
            ),
        )
        max_tiles = -(-batch.max_seq_len // split_batch.tile.block_n)
        if self.window:  # which need not begin where a tile does
            max_tiles = min(
                max_tiles, -(-(self.window + max_query_len) // split_batch.tile.block_n) + 1
            )
        choose = tiles.choose_num_splits if max_query_len == 1 else tiles.choose_draft_splits
        split_batch.num_splits = choose(num_rows, self.num_kv_heads, max_tiles, self.num_sms)
        if split_batch.num_splits > 1:
            new_empty = batch.seq_lens.new_empty
            shape = (num_rows, max_query_len, self.num_heads, split_batch.num_splits)
            split_batch.partial_out = new_empty((*shape, self.head_size), dtype=torch.float32)
            split_batch.partial_lse = new_empty(shape, dtype=torch.float32)
        return split_batch

    def _tile_list(
        self, metadata: TritonMetadata, rows: Sequence[int]
    ) -> Sequence[tuple[int, ...]]:
        """Tiles of queries, those with the most keys first: the last ones to finish are short."""
        batch = metadata.batch
        if (
            self.hopper_prefill is not None
            and batch.page_size == PAGE_SIZE
            and batch.max_query_len * self.gqa_group >= BLOCK_M
            and self.hopper_prefill.works
        ):
            return self.hopper_prefill.build_work_items(batch, rows)
        metadata.tile = tiles.prefill_tile(
            batch.max_query_len,
            self.gqa_group,
            self.head_size,
            self.itemsize,
            batch.max_seq_len,
            self.fp8_max > 0,
        )
        tokens_per_tile = metadata.tile.block_m // self.gqa_group
        tile_list: list[tuple[int, int, int]] = []
        for row in rows:
            query_len, seq_len = batch.query_lens_cpu[row], batch.seq_lens_cpu[row]
            for first_query in range(0, query_len, tokens_per_tile):
                num_keys = (
                    seq_len - query_len + first_query + tokens_per_tile if self.causal else seq_len
                )
                tile_list.append((min(num_keys, self.window or num_keys), row, first_query))
        tile_list.sort(key=lambda item: -item[0])
        return [(row, first_query) for _, row, first_query in tile_list]

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: TritonMetadata,
        scales: tuple[float, float] = (1.0, 1.0),
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.forward_into(out, q, k, v, cache, metadata, scales, sinks=sinks)
        return out

    def forward_into(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: TritonMetadata,
        scales: tuple[float, float] = (1.0, 1.0),
        *,
        sinks: Tensor | None = None,
    ) -> None:
        if k is not None and v is not None:
            self._write(k, v, cache, metadata.batch, scales)
        q = _dense_rows(q)
        for split_batch in metadata.split_batches:
            self._decode(q, cache, out, metadata.batch, split_batch, scales, sinks)
        if metadata.tile_list is not None and metadata.tile is not None:
            self._prefill(
                q, cache, out, metadata.batch, metadata.tile_list, metadata.tile, scales, sinks
            )
        elif metadata.tile_list is not None and self.hopper_prefill is not None:
            self.hopper_prefill.forward(q, cache, out, metadata.batch, metadata.tile_list)

    def _write(
        self,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        batch: CommonAttentionMetadata,
        scales: tuple[float, float],
    ) -> None:
        k, v = _dense_rows(k), _dense_rows(v)
        kv_width = self.num_kv_heads * self.head_size
        write_kernel[(k.shape[0],)](
            k, v, cache, batch.slot_mapping, k.stride(0), v.stride(0), cache.stride(0), *scales,
            KV_WIDTH=kv_width, BLOCK_SIZE=tiles.next_power_of_2(kv_width), FP8_MAX=self.fp8_max, num_warps=4,
        )  # fmt: skip

    def _decode(
        self,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        batch: CommonAttentionMetadata,
        split_batch: SplitKVBatch,
        scales: tuple[float, float],
        sinks: Tensor | None,
    ) -> None:
        tile = split_batch.tile
        decode_kernel[(split_batch.num_rows * split_batch.num_splits * self.num_kv_heads,)](
            q, cache, out, split_batch.partial_out, split_batch.partial_lse,
            batch.page_table, batch.seq_lens, batch.query_start_loc, split_batch.row_indices, sinks,
            q.stride(0), batch.page_table.stride(0), cache.stride(0),
            self.scale * scales[0], self.softcap or 0.0, scales[1],
            NUM_KV_HEADS=self.num_kv_heads, GQA_GROUP=self.gqa_group, MAX_QUERIES=split_batch.max_query_len, BLOCK_M=tile.block_m,
            HEAD_DIM=self.head_size, HEAD_DIM_PADDED=self.head_dim_padded, PAGE_SIZE=batch.page_size, BLOCK_N=tile.block_n,
            NUM_SPLITS=split_batch.num_splits, SLIDING_WINDOW=self.window or 0, CAUSAL=self.causal,
            HAS_SOFTCAP=bool(self.softcap), HAS_SINKS=sinks is not None, FP8_CACHE=self.fp8_max > 0, INPUT_PRECISION=self.input_precision,
            USE_PDL=self.use_pdl, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=self.use_pdl,
        )  # fmt: skip
        if split_batch.num_splits > 1:
            combine_kernel[(split_batch.num_rows * split_batch.max_query_len * self.num_heads,)](
                out, split_batch.partial_out, split_batch.partial_lse, batch.seq_lens, batch.query_start_loc, split_batch.row_indices,
                NUM_HEADS=self.num_heads, MAX_QUERIES=split_batch.max_query_len, HEAD_DIM=self.head_size, HEAD_DIM_PADDED=self.head_dim_padded,
                BLOCK_N=tile.block_n, NUM_SPLITS=split_batch.num_splits, NUM_SPLITS_PADDED=tiles.next_power_of_2(split_batch.num_splits),
                SLIDING_WINDOW=self.window or 0, USE_PDL=self.use_pdl, num_warps=4, launch_pdl=self.use_pdl,
            )  # fmt: skip

    def _prefill(
        self,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        batch: CommonAttentionMetadata,
        tile_list: Tensor,
        tile: tiles.Tile,
        scales: tuple[float, float],
        sinks: Tensor | None,
    ) -> None:
        prefill_kernel[(self.num_kv_heads, len(tile_list))](
            q, cache, out, batch.page_table, batch.seq_lens, batch.query_start_loc, tile_list, sinks,
            q.stride(0), batch.page_table.stride(0), cache.stride(0),
            self.scale * scales[0], self.softcap or 0.0, scales[1],
            NUM_KV_HEADS=self.num_kv_heads, GQA_GROUP=self.gqa_group, HEAD_DIM=self.head_size, HEAD_DIM_PADDED=self.head_dim_padded,
            PAGE_SIZE=batch.page_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SLIDING_WINDOW=self.window or 0,
            CAUSAL=self.causal, HAS_SOFTCAP=bool(self.softcap), HAS_SINKS=sinks is not None, FP8_CACHE=self.fp8_max > 0,
            INPUT_PRECISION=self.input_precision,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
            **({"maxnreg": tile.max_registers} if tile.max_registers else {}),
        )  # fmt: skip


def create(request: AttentionRequest) -> TritonAttention:
    """With what the CUDA device of this process can do."""
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    use_pdl = supports_pdl(request.device)
    hopper_prefill = HopperPrefill(request, num_sms) if supports(request) else None
    return TritonAttention(request, num_sms, use_pdl=use_pdl, hopper_prefill=hopper_prefill)


def _dense_rows(x: Tensor) -> Tensor:
    """``x`` ``[tokens, heads, size]`` with dense tokens; their distance may be anything."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _to_device(values: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    # Through pinned memory: a copy from pageable memory would wait for the device.
    pinned = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
