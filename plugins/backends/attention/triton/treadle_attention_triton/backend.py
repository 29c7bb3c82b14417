"""The backend: plans once per step, launches two to four kernels per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treadle.api.types import AttentionRequest, CommonAttentionMetadata
from treadle_attention_triton import tiles
from treadle_attention_triton.decode import combine_kernel, decode_kernel
from treadle_attention_triton.hopper.prompts import PAGE, TILE, Prompts, find_prompts
from treadle_attention_triton.prefill import prefill_kernel
from treadle_attention_triton.write import write_kernel
from treadle_paged_attention_kit.backend import PagedAttentionBackend
from treadle_triton_kit.support import supports_pdl

__all__ = ("SplitKVBatch", "TritonAttention", "TritonMetadata", "create")

_DRAFT = 8
"""New tokens of a row up to which its keys are worth splitting: drafts, not prompts."""


@dataclass(slots=True)
class SplitKVBatch:
    """Rows of few new tokens, their keys split over programs. The tensors are the kernel's."""

    count: int
    queries: int  # the most new tokens of a row
    tile: tiles.Tile
    splits: int = 1
    row_indices: Tensor | None = (
        None  # int32 [count], rows; None: the first ``count``, one token each
    )
    parts: Tensor | None = None  # float32 [count, queries, heads, splits, head_size]
    weights: Tensor | None = None  # float32 [count, queries, heads, splits]


@dataclass(slots=True)
class TritonMetadata:
    """One step. Holds every tensor that the kernels read: keep it as long as a captured graph."""

    batch: CommonAttentionMetadata
    items: list[SplitKVBatch] = field(default_factory=list)
    tile: tiles.Tile | None = None  # of ``prefill_kernel``; None: Hopper's kernel does the work
    tile_list: Tensor | None = None  # int32 [tiles, 2]: row, first query; Hopper's: [tiles, 5]


class TritonAttention(PagedAttentionBackend):
    """Serves one :class:`AttentionRequest`. Cache: ``[2, pages, page_size, kv_heads, head_size]``.

    A plan of decode rows only is graph-safe: ``forward`` reads lengths, page tables and slots on
    the device, its grid depends on the number of rows and on ``max_kv_len`` alone, and a row of
    length 0 (padding) yields zeros. Lengths may change between replays up to ``max_kv_len``; beyond
    it the result is right too, only less evenly split. ``use_pdl``, from Hopper on: decode kernels
    start before the kernel ahead of them has ended. ``prompts`` serves rows that fill its tiles.
    """

    def __init__(
        self,
        request: AttentionRequest,
        num_sms: int,
        *,
        use_pdl: bool = False,
        prompts: Prompts | None = None,
    ) -> None:
        super().__init__(request)
        self.head_dim_padded = tiles.power(request.head_size)
        self.precision = "ieee" if request.dtype == "float32" else "tf32"
        self.itemsize = getattr(torch, request.dtype).itemsize
        self.limit = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}.get(request.kv_dtype, 0.0)
        self.num_sms = num_sms
        self.use_pdl = use_pdl
        self.prompts = prompts

    def build_metadata(self, batch: CommonAttentionMetadata) -> TritonMetadata:
        plan = TritonMetadata(batch)
        rows: Sequence[int] = range(batch.num_decodes, len(batch.query_lens_cpu))
        if batch.num_decodes:
            plan.items.append(self._items(batch.num_decodes, 1, batch))
        if rows:
            drafts = [row for row in rows if batch.query_lens_cpu[row] <= _DRAFT]
            if drafts and self.group * _DRAFT <= 64:
                # At least two: one means to the kernel that items are the first rows of the step.
                queries = max(2, *(batch.query_lens_cpu[row] for row in drafts))
                items = self._items(len(drafts), queries, batch)
                if items.splits > 1:  # else they fill the device as tiles of queries
                    items.row_indices = _to_device(drafts, batch.seq_lens.device)
                    plan.items.append(items)
                    rows = [row for row in rows if batch.query_lens_cpu[row] > _DRAFT]
        if rows:
            plan.tile_list = _to_device(self._work(plan, rows), batch.seq_lens.device)
        return plan

    def _items(self, count: int, queries: int, batch: CommonAttentionMetadata) -> SplitKVBatch:
        items = SplitKVBatch(
            count,
            queries,
            tiles.decode_tile(
                queries * self.group,
                self.size,
                self.itemsize,
                count * self.kv_heads,
                self.limit > 0,
            ),
        )
        longest = -(-batch.max_seq_len // items.tile.keys)
        if self.window:  # which need not begin where a tile does
            longest = min(longest, -(-(self.window + queries) // items.tile.keys) + 1)
        items.splits = tiles.splits(count, self.kv_heads, longest, self.num_sms)
        if items.splits > 1:
            new = batch.seq_lens.new_empty
            shape = (count, queries, self.heads, items.splits)
            items.parts = new((*shape, self.size), dtype=torch.float32)
            items.weights = new(shape, dtype=torch.float32)
        return items

    def _work(self, plan: TritonMetadata, rows: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """Tiles of queries, those with the most keys first: the last ones to finish are short."""
        batch = plan.batch
        if (
            self.prompts is not None
            and batch.page_size == PAGE
            and batch.max_query_len * self.group >= TILE
        ):
            return self.prompts.tiles(batch, rows)
        plan.tile = tiles.prefill_tile(
            batch.max_query_len,
            self.group,
            self.size,
            self.itemsize,
            batch.max_seq_len,
            self.limit > 0,
        )
        tokens = plan.tile.rows // self.group
        work: list[tuple[int, int, int]] = []
        for row in rows:
            count, length = batch.query_lens_cpu[row], batch.seq_lens_cpu[row]
            for first in range(0, count, tokens):
                seen = length - count + first + tokens if self.causal else length
                work.append((min(seen, self.window or seen), row, first))
        work.sort(key=lambda item: -item[0])
        return [(row, first) for _, row, first in work]

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: TritonMetadata,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        if k is not None and v is not None:
            self._write(k, v, cache, metadata.batch, scales)
        q = _rows(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for items in metadata.items:
            self._decode(q, cache, out, metadata.batch, items, scales)
        if metadata.tile_list is not None and metadata.tile is not None:
            self._prefill(q, cache, out, metadata.batch, metadata.tile_list, metadata.tile, scales)
        elif metadata.tile_list is not None and self.prompts is not None:
            self.prompts.forward(q, cache, out, metadata.batch, metadata.tile_list)
        return out

    def _write(
        self,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        batch: CommonAttentionMetadata,
        scales: tuple[float, float],
    ) -> None:
        k, v = _rows(k), _rows(v)
        width = self.kv_heads * self.size
        write_kernel[(k.shape[0],)](
            k, v, cache, batch.slot_mapping, k.stride(0), v.stride(0), cache.stride(0), *scales,
            WIDTH=width, BLOCK=tiles.power(width), LIMIT=self.limit, num_warps=4,
        )  # fmt: skip

    def _decode(
        self,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        batch: CommonAttentionMetadata,
        items: SplitKVBatch,
        scales: tuple[float, float],
    ) -> None:
        tile = items.tile
        decode_kernel[(items.count * items.splits * self.kv_heads,)](
            q, cache, out, items.parts, items.weights,
            batch.page_table, batch.seq_lens, batch.query_start_loc, items.row_indices,
            q.stride(0), batch.page_table.stride(0), cache.stride(0),
            self.scale * scales[0], self.softcap or 0.0, scales[1],
            KV_HEADS=self.kv_heads, GROUP=self.group, QUERIES=items.queries, ROWS=tile.rows,
            SIZE=self.size, WIDE=self.head_dim_padded, PAGE=batch.page_size, BLOCK=tile.keys,
            SPLITS=items.splits, WINDOW=self.window or 0, CAUSAL=self.causal,
            CAPPED=bool(self.softcap), NARROW=self.limit > 0, PRECISION=self.precision,
            EARLY=self.use_pdl, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=self.use_pdl,
        )  # fmt: skip
        if items.splits > 1:
            combine_kernel[(items.count * items.queries * self.heads,)](
                out, items.parts, items.weights, batch.seq_lens, batch.query_start_loc, items.row_indices,
                HEADS=self.heads, QUERIES=items.queries, SIZE=self.size, WIDE=self.head_dim_padded,
                BLOCK=tile.keys, SPLITS=items.splits, ROOM=tiles.power(items.splits),
                WINDOW=self.window or 0, EARLY=self.use_pdl, num_warps=4, launch_pdl=self.use_pdl,
            )  # fmt: skip

    def _prefill(
        self,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        batch: CommonAttentionMetadata,
        work: Tensor,
        tile: tiles.Tile,
        scales: tuple[float, float],
    ) -> None:
        prefill_kernel[(self.kv_heads, len(work))](
            q, cache, out, batch.page_table, batch.seq_lens, batch.query_start_loc, work,
            q.stride(0), batch.page_table.stride(0), cache.stride(0),
            self.scale * scales[0], self.softcap or 0.0, scales[1],
            KV_HEADS=self.kv_heads, GROUP=self.group, SIZE=self.size, WIDE=self.head_dim_padded,
            PAGE=batch.page_size, M=tile.rows, BLOCK=tile.keys, WINDOW=self.window or 0,
            CAUSAL=self.causal, CAPPED=bool(self.softcap), NARROW=self.limit > 0,
            PRECISION=self.precision,
            num_warps=tile.warps, num_stages=tile.stages,
            **({"maxnreg": tile.registers} if tile.registers else {}),
        )  # fmt: skip


def create(request: AttentionRequest) -> TritonAttention:
    """With what the CUDA device of this process can do."""
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    early = supports_pdl(request.device)
    prompts = find_prompts(request, processors)
    return TritonAttention(request, processors, use_pdl=early, prompts=prompts)


def _rows(x: Tensor) -> Tensor:
    """``x`` ``[tokens, heads, size]`` with dense tokens; their distance may be anything."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _to_device(work: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    # Through pinned memory: a copy from pageable memory would wait for the device.
    pinned = torch.tensor(work, dtype=torch.int32, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
