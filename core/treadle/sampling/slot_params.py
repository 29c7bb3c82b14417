"""Sampling parameters that every slot has, in a device table that never moves."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import NewSequenceData
from treadle.sampling.noise import keys
from treadle.sampling.transfer import Int32Packer

__all__ = ("GREEDY_BELOW", "RowParams", "SlotParams", "effective_temperature")

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, since dividing by it may overflow float32."""

# offsets 2×i64, strides 2×i64, top_p f64, temperature f32, min_p f32, top_k i32, greedy i32
LAYOUT = struct.Struct("=4qd2f2i")
WIDTH = LAYOUT.size // 4


def effective_temperature(params: SamplingParams) -> float:
    """Return the temperature, or 0 if the request is greedy."""
    return 0.0 if params.temperature < GREEDY_BELOW else params.temperature


@dataclass(frozen=True, slots=True)
class RowParams:
    """Parameters of the rows of a step. The tensors are views of one gathered tensor."""

    offsets: Tensor  # int64 [rows, 2]
    strides: Tensor  # int64 [rows, 2]
    top_p: Tensor  # float64 [rows, 1]
    temperature: Tensor  # float32 [rows, 1]; 1 in greedy rows
    min_p: Tensor  # float32 [rows, 1]
    top_k: Tensor  # int32 [rows, 1]; the vocabulary size if it is off
    greedy: Tensor  # int32 [rows]; 1 or 0

    def index(self, rows: Tensor) -> RowParams:
        """Return a copy with the filter parameters of ``rows`` (int64 ``[n]``) only."""
        top_k, top_p, min_p = (
            t.index_select(0, rows) for t in (self.top_k, self.top_p, self.min_p)
        )
        return replace(self, top_k=top_k, top_p=top_p, min_p=min_p)


class SlotParams:
    """A table int32 ``[slots, WIDTH]``, viewed as other types. Slots are greedy at first."""

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        idle = NewSequenceData(
            slot=0,
            params=SamplingParams(temperature=0.0),
            num_prompt_tokens=0,
            token_ids=[],
            seed=0,
            stop_token_ids=[],
            bad_words=[],
        )
        row = torch.frombuffer(bytearray(self._pack(idle)), dtype=torch.int32)
        self._table = row.repeat(count, 1).to(device)
        self._pending: list[tuple[slice, slice]] = []

    def pack(self, start: NewSequenceData, packer: Int32Packer) -> None:
        span = packer.add((start.slot,))
        self._pending.append((span, packer.add(struct.unpack(f"={WIDTH}i", self._pack(start)))))

    def write(self, data: Tensor) -> None:
        """Fill the rows that ``pack`` added, from ``data``, the packer's contents on the device."""
        slots = torch.cat([data[span] for span, _ in self._pending]).long()
        rows = torch.stack([data[row] for _, row in self._pending])
        self._table.index_copy_(0, slots, rows)
        self._pending = []

    def row_params(self, slots: Tensor) -> RowParams:
        """Return the parameters of ``slots`` (int64 ``[rows]``)."""
        rows = self._table.index_select(0, slots)
        longs, floats = rows.view(torch.int64), rows.view(torch.float32)
        return RowParams(
            offsets=longs[:, 0:2],
            strides=longs[:, 2:4],
            top_p=rows.view(torch.float64)[:, 4:5],
            temperature=floats[:, 10:11],
            min_p=floats[:, 11:12],
            top_k=rows[:, 12:13],
            greedy=rows[:, 13],
        )

    def _pack(self, start: NewSequenceData) -> bytes:
        params = start.params
        temperature = effective_temperature(params)
        return LAYOUT.pack(
            *keys(start.seed),
            params.top_p,
            temperature or 1.0,
            params.min_p,
            min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size,
            temperature == 0.0,
        )
