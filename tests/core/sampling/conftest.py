"""What the sampler's tests share: requests in slots, a step for a batch of them, and Pearson's χ² test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import NewSequenceData
from treadle.sampling.draw import argmax
from treadle.sampling.sampler import Sampler

Start = Callable[..., NewSequenceData]


def make_start(
    slot: int,
    *,
    tokens: Sequence[int] = (0,),
    prompt_len: int | None = None,
    seed: int | None = None,
    stop_ids: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
    **params: Any,
) -> NewSequenceData:
    """A request in ``slot``; its seed is the slot number unless one is given."""
    return NewSequenceData(
        slot=slot,
        params=SamplingParams(**params),
        num_prompt_tokens=len(tokens) if prompt_len is None else prompt_len,
        token_ids=list(tokens),
        seed=slot if seed is None else seed,
        stop_token_ids=list(stop_ids),
        bad_words=[list(word) for word in words],
    )


# Standard deviations: about one false alarm in 30,000 choices of seeds.
LIMIT = 4.0
FEWEST = 10.0  # expected observations in a cell, for the approximation to hold


def check_follows(samples: Tensor, probabilities: Tensor) -> None:
    """Fail if int64 ``samples`` do not look drawn from ``probabilities`` (float64, sum 1).

    Values expected less than ``FEWEST`` times are tested together, in one cell.
    """
    probabilities = probabilities.double()
    counts = torch.bincount(samples, minlength=len(probabilities)).double()
    assert len(counts) == len(probabilities), "a sample is out of range"
    assert not counts[probabilities == 0].any(), "an impossible value was drawn"
    expected = probabilities * len(samples)
    rare = expected < FEWEST
    cells = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() >= FEWEST:
        cells.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    observed = torch.cat([cell[0] for cell in cells])
    expected_counts = torch.cat([cell[1] for cell in cells])
    statistic = float(((observed - expected_counts) ** 2 / expected_counts).sum())
    freedom = len(observed) - 1
    assert freedom > 0
    # Wilson and Hilferty: the cube root of χ²/n is nearly normal.
    spread = 2 / (9 * freedom)
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert deviation < LIMIT, f"χ² is {statistic:.1f} for {freedom} degrees of freedom"


class Bench:
    """A sampler on a CPU that is driven with host values."""

    def __init__(self, vocab_size: int, slots: int = 64) -> None:
        self.sampler = Sampler(slots + 1, vocab_size)
        self.lengths: dict[int, int] = {}

    def open(self, *starts: NewSequenceData) -> None:
        self.sampler.add_sequences(starts)
        self.lengths.update((start.slot, len(start.token_ids)) for start in starts)

    def arguments(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        return torch.tensor(rows), torch.tensor([self.lengths[slot] for slot in rows]), list(rows)

    def sample(self, logits: Tensor, rows: Sequence[int], **options: Any) -> list[int]:
        """Sample ``rows`` and advance their positions."""
        output = self.sampler.sample(logits, *self.arguments(rows), **options)
        for slot in rows:
            self.lengths[slot] += 1
        tokens: list[int] = output.token_ids.tolist()
        return tokens

    def distribution(self, logits: Tensor, rows: Sequence[int], **options: Any) -> Tensor:
        return probabilities(self.sampler, logits, *self.arguments(rows), **options)


def probabilities(
    sampler: Sampler,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Sequence[int],
    bitmask: Tensor | None = None,
    bitmask_rows: Tensor | None = None,
) -> Tensor:
    """The probabilities that ``Sampler.sample`` draws from, float32 ``[rows, vocab]``; greedy rows
    are one-hot. Records nothing."""
    selection = sampler._select(rows)
    edited = sampler._apply_edits(logits, positions, selection, bitmask, bitmask_rows)
    params = sampler._slots.row_params(slots)
    weights = sampler._weights(edited, params, selection.groups)
    probs = weights / weights.sum(dim=-1, keepdim=True)
    best = argmax(edited, sampler.blocks)[0].unsqueeze(1)
    one_hot = torch.zeros_like(probs).scatter_(1, best, 1.0)
    return torch.where(params.greedy.unsqueeze(1) > 0, one_hot, probs)


@pytest.fixture(scope="session")
def distribution() -> Callable[..., Tensor]:
    return probabilities


@pytest.fixture
def start() -> Start:
    return make_start


@pytest.fixture
def bench() -> type[Bench]:
    return Bench


@pytest.fixture
def assert_follows() -> Callable[[Tensor, Tensor], None]:
    """Pearson's χ² test; seeds are fixed, so a test passes always or never."""
    return check_follows
