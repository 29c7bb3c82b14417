"""Which rows of a step need which sampling stages; cached while the rows stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.sampling.features import Features
from treadle.sampling.logits_edit import EditRows, LogitsEdit, SlotRowPool
from treadle.sampling.transfer import upload

__all__ = ("FilterGroup", "SamplingMetadata")


@dataclass(frozen=True, slots=True)
class FilterGroup:
    """Rows that use the same filters."""

    rows: Tensor | None  # int64 [n]; None: all rows
    features: Features


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What ``Sampler.sample`` does for these rows, as lists and as tensors on the device."""

    rows: list[int]
    features: Features
    groups: list[FilterGroup]
    edits: list[tuple[LogitsEdit, EditRows]]
    logprobs: Tensor | None  # int64 [n]: batch rows
    logprob_rows: list[int]
    logprob_counts: list[int]

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        features: Sequence[Features],
        tables: Sequence[LogitsEdit],
        logprobs: Mapping[int, int],
        device: torch.device,
    ) -> SamplingMetadata:
        """Create the metadata. ``features`` and ``logprobs`` (alternatives) are by slot."""
        asked = [row for row, slot in enumerate(rows) if slot in logprobs] if logprobs else []
        chosen = [(table, rows_in_pool(table.pool, rows)) for table in tables]
        chosen = [(table, batch) for table, batch in chosen if batch]
        kinds = {features[slot] for slot in rows}
        groups = split(rows, features, kinds)

        lists = [asked]
        for table, batch in chosen:
            lists += [batch, [table.pool[rows[row]] for row in batch]]
        lists += [batch for batch, _ in groups if batch is not None]
        tensors = iter(upload_lists(lists, device))
        logprob_rows = next(tensors)
        return cls(
            rows=list(rows),
            features=union(kinds),
            logprobs=logprob_rows if asked else None,
            logprob_rows=asked,
            logprob_counts=[logprobs[rows[row]] for row in asked],
            edits=[
                (table, EditRows(next(tensors), next(tensors), [rows[row] for row in batch]))
                for table, batch in chosen
            ],
            groups=[
                FilterGroup(None if batch is None else next(tensors), kind)
                for batch, kind in groups
            ],
        )


def rows_in_pool(pool: SlotRowPool, rows: Sequence[int]) -> list[int]:
    return [row for row, slot in enumerate(rows) if slot in pool] if len(pool) else []


def union(kinds: set[Features]) -> Features:
    result = Features()
    for kind in kinds:
        result |= kind
    return result


def split(
    rows: Sequence[int], features: Sequence[Features], kinds: set[Features]
) -> list[tuple[list[int] | None, Features]]:
    """Group the rows that need filters. A group of ``None`` is all rows.

    Otherwise one row with a binary search would cause a search for the whole batch.
    """
    groups: list[tuple[list[int] | None, Features]] = []
    searching = {kind for kind in kinds if kind.needs_thresholds}
    listing = {kind for kind in kinds if kind.filters} - searching
    for members in (listing, searching):
        if not members:
            continue
        batch = [row for row, slot in enumerate(rows) if features[slot] in members]
        # Copying rows out and back costs about as much as filtering twice as many rows.
        most = not searching and 2 * len(batch) > len(rows)
        everywhere = most or len(batch) == len(rows)
        groups.append((None if everywhere else batch, union(members)))
    return groups


def upload_lists(lists: Sequence[list[int]], device: torch.device) -> list[Tensor]:
    """Return each list as int64 ``[n]`` on the device, in one transfer."""
    flat = [value for values in lists for value in values]
    data = torch.empty(0, dtype=torch.int64, device=device)
    if flat:
        data = upload(torch.tensor(flat, dtype=torch.int64), device)
    parts = []
    start = 0
    for values in lists:
        parts.append(data[start : start + len(values)])
        start += len(values)
    return parts
