"""The backend: decode reads pages through xformers' split-K operator, all else is gathered for its
FlashAttention.

Operators are called directly. ``memory_efficient_attention`` in front of them insists that xformers'
C++ library is loaded, which is built for CUDA 12 and which neither operator uses: one is Triton, the
other torch's own FlashAttention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from xformers.ops.fmha import attn_bias, flash, triton_splitk
from xformers.ops.fmha.common import Inputs

from treadle.api.types import CommonAttentionMetadata
from treadle_paged_attention_kit.backend import PagedAttentionBackend
from treadle_paged_attention_kit.cache import write_kv

__all__ = ("DecodeBatch", "PrefillBatch", "XformersAttention", "XformersMetadata", "splits")

_GATHERED = 1 << 15
"""Keys to gather at once, unless one row has more. For 8 heads of 128 in bfloat16 it is 128 MiB."""

_PROGRAMS = 2048
"""Programs to aim for. More than a device runs at once, because what is split is the width of the
page table: behind the end of a row there is nothing to do."""


@dataclass(slots=True)
class DecodeBatch:
    """The first ``rows`` rows, of one new token each.

    Rows and pages are padded to powers of two: Triton compiles anew for each number of either.
    """

    rows: int
    columns: int  # of the page table that hold pages
    padded_rows: int
    padded_columns: int
    operator: Any
    bias: Any  # its lengths and page table are put in by ``forward``


@dataclass(slots=True)
class PrefillBatch:
    """Consecutive rows of several new tokens: prompts, chunks of prompts, drafts."""

    tokens: slice
    slots: Tensor  # int64 [keys]: where the keys of all rows lie in the cache, row after row
    new: bool  # nothing of them was in the cache before
    bias: Any


@dataclass(slots=True)
class XformersMetadata:
    """One step."""

    batch: CommonAttentionMetadata
    decodes: DecodeBatch | None = None
    prompts: list[PrefillBatch] = field(default_factory=list)


class XformersAttention(PagedAttentionBackend):
    """Serves one :class:`AttentionRequest`. Cache: ``[2, pages, page_size, kv_heads, head_size]``.

    A plan of decode rows only is graph-safe: ``forward`` copies lengths and page tables of the batch
    on the device, and shapes follow from the number of rows and ``max_kv_len``.
    """

    def build_metadata(self, batch: CommonAttentionMetadata) -> XformersMetadata:
        plan = XformersMetadata(batch)
        if batch.num_decodes:
            plan.decodes = self._decodes(batch)
        ends = list(accumulate(batch.query_lens_cpu, initial=0))
        for first, last in _runs(batch):
            plan.prompts.append(self._prompts(batch, first, last, slice(ends[first], ends[last])))
        return plan

    def _decodes(self, batch: CommonAttentionMetadata) -> DecodeBatch:
        rows, columns = batch.num_decodes, -(-batch.max_seq_len // batch.page_size)
        padded_rows, padded_columns = _power(rows), _power(columns)
        table = batch.page_table.new_empty(padded_rows, padded_columns)
        # On the CPU, because making it may be captured in a graph: what the kernel reads of it are
        # the lengths and the page table only.
        bias = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * padded_rows,
            kv_seqlen=[1] * padded_rows,
            block_tables=table,
            page_size=batch.page_size,
            device=torch.device("cpu"),
        )
        count = splits(padded_rows * self.num_kv_heads, padded_columns * batch.page_size)
        operator = triton_splitk.FwOp.get_operator(count, block_n=min(64, batch.page_size))
        return DecodeBatch(rows, columns, padded_rows, padded_columns, operator, bias)

    def _prompts(
        self, batch: CommonAttentionMetadata, first: int, last: int, tokens: slice
    ) -> PrefillBatch:
        device, size = batch.seq_lens.device, batch.page_size
        queries = list(batch.query_lens_cpu[first:last])
        keys = list(batch.seq_lens_cpu[first:last])
        bias = attn_bias.BlockDiagonalMask.from_seqlens(queries, keys, device=device)
        if self.causal:
            bias = bias.make_causal_from_bottomright()
        lengths, total = batch.seq_lens[first:last].long(), sum(keys)
        row = torch.arange(len(keys), device=device)
        row = row.repeat_interleave(lengths, output_size=total)
        position = torch.arange(total, device=device) - (lengths.cumsum(0) - lengths)[row]
        page = batch.page_table[first:last][row, position // size].long()
        return PrefillBatch(tokens, page * size + position % size, queries == keys, bias)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: Tensor,
        metadata: XformersMetadata,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        if k is not None and v is not None:
            write_kv(cache, k, v, metadata.batch.slot_mapping)
        keys, values = cache.flatten(1, 2)  # [slots, kv_heads, head_size] each
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if metadata.decodes is not None:
            self._decode(q, keys, values, metadata.batch, metadata.decodes, out)
        for rows in metadata.prompts:
            if rows.new and k is not None and v is not None:
                pair = k[rows.tokens], v[rows.tokens]
            else:
                pair = keys.index_select(0, rows.slots), values.index_select(0, rows.slots)
            out[rows.tokens] = self._apply(flash.FwOp, q[rows.tokens], *pair, rows.bias)
        return out

    def _decode(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: CommonAttentionMetadata,
        decodes: DecodeBatch,
        out: Tensor,
    ) -> None:
        rows, padded_rows = decodes.rows, decodes.padded_rows
        table = batch.page_table[:rows, : decodes.columns]
        decodes.bias.block_tables = _padded(table, padded_rows, decodes.padded_columns)
        decodes.bias.k_seqinfo.seqlen = _padded(batch.seq_lens[:rows], padded_rows)
        q = _padded(q[:rows], padded_rows)
        out[:rows] = self._apply(decodes.operator, q, keys, values, decodes.bias)[:rows]

    def _apply(self, operator: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any) -> Tensor:
        """``q`` is ``[tokens, heads, head_size]``, ``k`` and ``v`` ``[keys, kv_heads, head_size]``."""
        grouped = q.unflatten(1, (self.num_kv_heads, self.gqa_group))[None]
        # Nothing is copied: the operators see by the stride of 0 that a group shares its keys.
        k, v = (x[None, :, :, None].expand(-1, -1, -1, self.gqa_group, -1) for x in (k, v))
        out, _ = operator.apply(Inputs(grouped, k, v, bias, scale=self.scale), needs_gradient=False)
        result: Tensor = out.reshape(q.shape)
        return result


def splits(num_pairs: int, keys: int) -> int:
    """How many programs share the keys of one of ``num_pairs`` (row, kv head) pairs, up to ``keys`` long.

    A power of two, so that few variants are compiled. Chunks are of 128 keys and more, and there are
    no more than 64: xformers' own limits, whose choice counts rows only and so takes gigabytes for
    partial results where rows are many.
    """
    target = min(_PROGRAMS // num_pairs, keys // 128, 64)
    return 1 << max(target, 1).bit_length() - 1


def _runs(batch: CommonAttentionMetadata) -> Iterator[tuple[int, int]]:
    """Rows ``[first, last)`` behind the decodes, in runs whose keys may be gathered at once."""
    first, gathered = batch.num_decodes, 0
    for row in range(first, len(batch.seq_lens_cpu)):
        length = batch.seq_lens_cpu[row]
        if gathered and gathered + length > _GATHERED:
            yield first, row
            first, gathered = row, 0
        gathered += length
    if gathered:
        yield first, len(batch.seq_lens_cpu)


def _power(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def _padded(x: Tensor, *sizes: int) -> Tensor:
    """``x`` with zeros behind it, so that its first dimensions have these ``sizes``."""
    if x.shape[: len(sizes)] == sizes:
        return x
    padded = x.new_zeros(*sizes, *x.shape[len(sizes) :])
    padded[tuple(slice(n) for n in x.shape[: len(sizes)])] = x
    return padded
