"""Attention metadata of the SDPA backend, computed once per step for all layers.

A *unit* is a (row, KV head) pair, with the ``heads / kv_heads`` query heads of that KV head. Keys
and values are gathered as ``[units, width, head_size]``, the layout of a batched matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treadle.api.attention import CommonAttentionMetadata

__all__ = ("DecodeBatch", "PrefillRow", "SdpaMetadata", "bias", "make_plan", "width")


@dataclass(slots=True)
class DecodeBatch:
    """Rows of one new token each, with keys padded to the same width."""

    rows: Tensor | slice  # which tokens (= rows) of the step
    count: int
    padded_kv_len: int
    index: Tensor  # int64 [count * kv_heads * width], rows of the cache as [slots * kv_heads, size]
    attention_bias: (
        Tensor | None
    )  # float32 [count * kv_heads, 1, width]: 0 or -inf; None: nothing is padded


@dataclass(slots=True)
class PrefillRow:
    """A row of several new tokens: a prompt, a chunk of a prompt, or drafts to verify."""

    start: int  # first token in the step
    length: int
    total: int  # tokens in the cache, including the new ones
    pages: Tensor  # int32 [pages], this row of the page table
    index: Tensor | None = None
    """int64 [kv_heads * (total - first)], created on first use: a new prompt does not need it."""


@dataclass(slots=True)
class SdpaMetadata:
    slot_mapping: Tensor
    page_size: int
    decodes: list[DecodeBatch] = field(default_factory=list)
    prompts: list[PrefillRow] = field(default_factory=list)


def width(tokens: int) -> int:
    """Return the padded number of keys of a row, independent of other rows for equal rounding."""
    if tokens <= 512:
        return max(64, 1 << (tokens - 1).bit_length())
    return (tokens + 255) // 256 * 256


def bias(
    length: int, cached: int, first_key: int, end_key: int, window: int | None, device: torch.device
) -> Tensor:
    """Return the attention bias, float32 ``[length, end_key - first_key]``.

    It is 0 if the query at position ``cached + i`` attends to key ``first_key + j``, else -inf.
    """
    offset = cached - first_key
    hidden = torch.ones(length, end_key - first_key, dtype=torch.bool, device=device).triu_(
        offset + 1
    )
    if window is not None:
        hidden |= torch.ones_like(hidden).tril_(offset - window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def make_plan(batch: CommonAttentionMetadata, kv_heads: int, window: int | None) -> SdpaMetadata:
    plan = SdpaMetadata(batch.slot_mapping, batch.page_size)
    lengths = batch.seq_lens_cpu
    if batch.num_decodes:
        for rows, size in _by_width(lengths[: batch.num_decodes], window):
            plan.decodes.append(_decodes(batch, rows, size, kv_heads, window))
    start = batch.num_decodes
    for row in range(batch.num_decodes, len(lengths)):
        length = batch.query_lens_cpu[row]
        plan.prompts.append(PrefillRow(start, length, lengths[row], batch.page_table[row]))
        start += length
    return plan


def _by_width(lengths: Sequence[int], window: int | None) -> Iterable[tuple[list[int], int]]:
    groups: dict[int, list[int]] = {}
    for row, tokens in enumerate(lengths):
        seen = tokens if window is None else min(tokens, window)
        groups.setdefault(width(seen), []).append(row)
    return ((rows, size) for size, rows in groups.items())


def _decodes(
    batch: CommonAttentionMetadata, rows: list[int], size: int, kv_heads: int, window: int | None
) -> DecodeBatch:
    device = batch.page_table.device
    count = len(rows)
    row_index: Tensor | slice
    if rows[-1] - rows[0] + 1 == count:
        row_index = slice(rows[0], rows[-1] + 1)
    else:
        row_index = torch.tensor(rows, device=device)
    last = batch.seq_lens[row_index].to(torch.int64).sub_(1).unsqueeze_(1)
    position = torch.arange(size, device=device).unsqueeze(0)
    if window is not None:
        position = position + (last - (window - 1)).clamp_(min=0)
    # Pad with the row's own last token. Stale data of other sequences is never read, so that their
    # NaN cannot spread.
    padded = position > last
    position = torch.minimum(position, last)
    page = batch.page_table[row_index].gather(1, position // batch.page_size)
    slot = page.to(torch.int64) * batch.page_size + position % batch.page_size
    heads = torch.arange(kv_heads, device=device).view(1, kv_heads, 1)
    index = (slot.unsqueeze(1) * kv_heads + heads).view(-1)
    lengths = [batch.seq_lens_cpu[row] for row in rows]
    if all(min(n, window or n) == size for n in lengths):
        return DecodeBatch(row_index, count, size, index, None)
    mask = torch.zeros(count, 1, size, device=device).masked_fill_(
        padded.unsqueeze(1), float("-inf")
    )
    mask = mask.expand(count, kv_heads, size).reshape(count * kv_heads, 1, size)
    return DecodeBatch(row_index, count, size, index, mask)
