"""Page tables as FlashInfer wants them: the pages of all rows, one row after the other, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ("PageIndices", "build_page_indices", "windowed_page_table")


@dataclass(frozen=True, slots=True)
class PageIndices:
    """Some rows of a step, on the host."""

    qo_indptr: (
        Tensor  # int32 [rows + 1]: row r brings the new tokens [qo_indptr[r], qo_indptr[r + 1])
    )
    kv_indptr: Tensor  # int32 [rows + 1]: row r has the pages [kv_indptr[r], kv_indptr[r + 1])
    last_page_len: Tensor  # int32 [rows]: tokens in the last page of a row, 1 to page_size
    kv_lens: Tensor  # int32 [rows]: tokens in all its pages
    table_indices: Tensor  # int64 [pages]: where in the flattened page table their numbers stand


def build_page_indices(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_size: int,
    columns: int,
    window: int | None = None,
    *,
    pinned: bool = False,
) -> PageIndices:
    """The pages of rows with ``query_lens`` new tokens and ``kv_lens`` tokens in all.

    ``columns`` is the width of the page table. PageIndices that ``window`` has left behind for all new
    tokens of a row are cut off its front: they stand for page 0 by then, whose keys would be masked
    but whose values, times a weight of 0, would not stay out if they were NaN. ``pinned`` tensors
    can be copied to a device without waiting for it.
    """
    skipped = [0] * len(kv_lens)
    if window is not None:
        skipped = [
            max(0, total - query_len + 1 - window) // page_size
            for query_len, total in zip(query_lens, kv_lens, strict=True)
        ]
    ends = [-(-total // page_size) for total in kv_lens]
    counts = [end - first for first, end in zip(skipped, ends, strict=True)]
    lengths = [total - first * page_size for first, total in zip(skipped, kv_lens, strict=True)]
    entries = [
        row * columns + page
        for row, (first, end) in enumerate(zip(skipped, ends, strict=True))
        for page in range(first, end)
    ]

    def host(numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, pin_memory=pinned)

    return PageIndices(
        host(list(accumulate(query_lens, initial=0))),
        host(list(accumulate(counts, initial=0))),
        host([(total - 1) % page_size + 1 for total in kv_lens]),
        host(lengths),
        host(entries, torch.int64),
    )


def windowed_page_table(
    page_table: Tensor, kv_lens: Tensor, page_size: int, window: int
) -> tuple[Tensor, Tensor]:
    """What rows of one new token see through ``window``: page table and lengths from the first page
    on that is not left behind. On the device, where lengths may change between replays."""
    skipped = (kv_lens - window).clamp_(min=0).div_(page_size, rounding_mode="floor")
    columns = min(page_table.shape[1], (window + page_size - 2) // page_size + 1)
    column = torch.arange(columns, device=page_table.device) + skipped.unsqueeze(1)
    table = page_table.gather(1, column.clamp_(max=page_table.shape[1] - 1))
    return table, kv_lens - skipped * page_size
