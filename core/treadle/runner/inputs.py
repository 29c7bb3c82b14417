"""Device tensors of a step, from the scheduler output, in one packed copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treadle.api.attention import CommonAttentionMetadata
from treadle.api.step_types import PageTableUpdate, SchedulerOutput
from treadle.sampling.transfer import Packer

__all__ = ("PageTables", "StepInputs", "build_inputs", "expand_tokens")


class PageTables:
    """Page tables ``[slots, columns]`` on CPU side and device, for each KV cache group.

    The last slot is for padding rows: all its columns are the null page.
    """

    def __init__(self, groups: int, slots: int, columns: int, packer: Packer, device: torch.device):
        self.tables_cpu = [np.zeros((slots, columns), dtype=np.int32) for _ in range(groups)]
        self._packer = packer
        # On a CPU both are the same memory.
        self.device = [torch.from_numpy(table).to(device) for table in self.tables_cpu]
        self._cuda = device.type != "cpu"

    def write(self, updates: list[PageTableUpdate], current: Mapping[int, int]) -> None:
        """Apply updates to the tables.

        ``current`` maps the slots of a captured step to the column of the new token. If an update
        consists of that column, it is not copied to the device: the CUDA graph writes it.
        """
        changed: list[list[np.ndarray]] = [[] for _ in self.tables_cpu]
        for update in updates:
            table = self.tables_cpu[update.group]
            end = update.start + len(update.pages)
            table[update.slot, update.start : end] = update.pages
            if self._cuda and not (
                len(update.pages) == 1 and current.get(update.slot) == update.start
            ):
                base = update.slot * table.shape[1]
                changed[update.group].append(np.arange(base + update.start, base + end))
        for group, pieces in enumerate(changed):
            if pieces:
                indices = np.concatenate(pieces)
                values = self.tables_cpu[group].reshape(-1)[indices]
                index, pages = self._packer.upload(indices, values)
                self.device[group].view(-1).index_copy_(0, index, pages)


@dataclass(slots=True)
class StepInputs:
    """The inputs of a step. ``sample_*`` describe the rows that need sampling."""

    input_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    batches: list[CommonAttentionMetadata]
    logits_indices: Tensor | None  # int64 [sampled], a row's last token; None: all tokens
    sample_slots: Tensor  # int64 [sampled]
    sample_positions: Tensor  # int64 [sampled], index of the new token in its sequence
    sample_slots_cpu: list[int]  # slots of the sampled rows


def expand_tokens(scheduler_output: SchedulerOutput) -> tuple[np.ndarray, np.ndarray]:
    """Return slot and position of each token of a step, int64 ``[tokens]``."""
    slots = np.asarray(scheduler_output.slots, dtype=np.int64)
    starts = np.asarray(scheduler_output.num_computed_tokens, dtype=np.int64)
    if not scheduler_output.tokens:
        return slots, starts
    counts = np.asarray(scheduler_output.num_scheduled_tokens, dtype=np.int64)
    first = np.cumsum(counts) - counts
    offsets = np.arange(first[-1] + counts[-1]) - np.repeat(first, counts)
    return np.repeat(slots, counts), np.repeat(starts, counts) + offsets


def build_inputs(
    scheduler_output: SchedulerOutput,
    tables: PageTables,
    last_tokens: Tensor,
    page_size: int,
    packer: Packer,
) -> StepInputs:
    """Build the inputs of a step. Ids of decode rows are taken from ``last_tokens``."""
    slots = np.asarray(scheduler_output.slots, dtype=np.int64)
    starts = np.asarray(scheduler_output.num_computed_tokens, dtype=np.int64)
    counts = np.asarray(scheduler_output.num_scheduled_tokens, dtype=np.int64)
    kv_lens = (starts + counts).astype(np.int32)
    query_start = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    rows_slots, positions = expand_tokens(scheduler_output)
    mappings = [
        table[rows_slots, positions // page_size].astype(np.int64) * page_size
        + positions % page_size
        for table in tables.tables_cpu
    ]
    needs_sampling = np.asarray(scheduler_output.needs_sampling, dtype=bool)
    ends = query_start[1:][needs_sampling].astype(np.int64) - 1
    if not len(ends):  # at least one, since kernels need a row
        ends = query_start[1:2].astype(np.int64) - 1
    sampled_slots = slots[needs_sampling]
    sample_positions = kv_lens[needs_sampling].astype(np.int64)
    ids = np.asarray(scheduler_output.tokens, dtype=np.int64)

    tensors = packer.upload(
        slots,
        query_start,
        kv_lens,
        positions,
        ids,
        ends,
        sampled_slots,
        sample_positions,
        *mappings,
    )
    d_slots, d_start, d_kv, d_pos, d_ids, d_ends, d_sampled, d_sample_positions = tensors[:8]
    if scheduler_output.num_decodes:
        first = last_tokens.index_select(0, d_slots[: scheduler_output.num_decodes])
        d_ids = first if scheduler_output.num_decodes == len(slots) else torch.cat((first, d_ids))
    max_seq_len = int(kv_lens.max())
    columns = -(-max_seq_len // page_size)
    counts_host, kv_host = scheduler_output.num_scheduled_tokens, kv_lens.tolist()
    batches = [
        CommonAttentionMetadata(
            page_size=page_size,
            num_decodes=scheduler_output.num_decodes,
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
            query_start_loc=d_start,
            seq_lens=d_kv,
            page_table=table[:, :columns].index_select(0, d_slots),
            slot_mapping=mapping,
            query_lens_cpu=counts_host,
            seq_lens_cpu=kv_host,
        )
        for table, mapping in zip(tables.device, tensors[8:], strict=True)
    ]
    return StepInputs(
        input_ids=d_ids,
        positions=d_pos,
        batches=batches,
        logits_indices=None if len(ends) == len(positions) else d_ends,
        sample_slots=d_sampled,
        sample_positions=d_sample_positions,
        sample_slots_cpu=sampled_slots.tolist(),
    )
