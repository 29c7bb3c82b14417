"""Which rows of a step need which sampling stages; cached while the rows stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
from torch import Tensor

from treadle.sampling.features import Features
from treadle.sampling.logits_edit import EditRows, LogitsEdit, SlotRowPool
from treadle.sampling.transfer import Packer

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
        packer: Packer,
    ) -> SamplingMetadata:
        """Create the metadata. ``features`` and ``logprobs`` (alternatives) are by slot."""
        rows_with_logprobs = (
            [row for row, slot in enumerate(rows) if slot in logprobs] if logprobs else []
        )
        edits = [(table, rows_in_pool(table.pool, rows)) for table in tables]
        edits = [(table, batch) for table, batch in edits if batch]
        kinds = {features[slot] for slot in rows}
        groups = split(rows, features, kinds)

        lists = [rows_with_logprobs] if rows_with_logprobs else []
        for table, batch in edits:
            lists += [batch, [table.pool[rows[row]] for row in batch]]
        lists += [batch for batch, _ in groups if batch is not None]
        tensors = iter(packer.upload(*(np.array(values, dtype=np.int64) for values in lists)))
        return cls(
            rows=list(rows),
            features=reduce(or_, kinds, Features()),
            logprobs=next(tensors) if rows_with_logprobs else None,
            logprob_rows=rows_with_logprobs,
            logprob_counts=[logprobs[rows[row]] for row in rows_with_logprobs],
            edits=[
                (table, EditRows(next(tensors), next(tensors), [rows[row] for row in batch]))
                for table, batch in edits
            ],
            groups=[
                FilterGroup(None if batch is None else next(tensors), kind)
                for batch, kind in groups
            ],
        )


def rows_in_pool(pool: SlotRowPool, rows: Sequence[int]) -> list[int]:
    return [row for row, slot in enumerate(rows) if slot in pool] if len(pool) else []


def split(
    rows: Sequence[int], features: Sequence[Features], kinds: set[Features]
) -> list[tuple[list[int] | None, Features]]:
    """Group the rows that need filters. A group of ``None`` is all rows.

    Otherwise one row with a binary search would cause a search for the whole batch.
    """
    groups: list[tuple[list[int] | None, Features]] = []
    search_kinds = {kind for kind in kinds if kind.needs_thresholds}
    list_kinds = {kind for kind in kinds if kind.filters} - search_kinds
    for members in (list_kinds, search_kinds):
        if not members:
            continue
        batch = [row for row, slot in enumerate(rows) if features[slot] in members]
        # Copying rows out and back costs about as much as filtering twice as many rows.
        is_majority = not search_kinds and 2 * len(batch) > len(rows)
        covers_all = is_majority or len(batch) == len(rows)
        groups.append((None if covers_all else batch, reduce(or_, members)))
    return groups
