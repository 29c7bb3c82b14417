"""What the sampler's tests share: requests in slots, and one step for a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.engine.plan import SlotStart
from weft.sampling.params import SamplingParams
from weft.sampling.sampler import Sampler

Start = Callable[..., SlotStart]


def make_start(
    slot: int,
    *,
    tokens: Sequence[int] = (0,),
    prompt_len: int | None = None,
    seed: int | None = None,
    stop_ids: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
    **params: Any,
) -> SlotStart:
    """A request in ``slot``; its seed is the slot number unless one is given."""
    return SlotStart(
        slot=slot,
        params=SamplingParams(**params),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        tokens=list(tokens),
        seed=slot if seed is None else seed,
        stop_ids=list(stop_ids),
        bad_words=[list(word) for word in words],
    )


class Bench:
    """A sampler on a CPU that is driven with host values."""

    def __init__(self, vocab_size: int, slots: int = 64) -> None:
        self.sampler = Sampler(slots + 1, vocab_size)
        self.lengths: dict[int, int] = {}

    def open(self, *starts: SlotStart) -> None:
        self.sampler.open(starts)
        self.lengths.update((start.slot, len(start.tokens)) for start in starts)

    def arguments(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        return torch.tensor(rows), torch.tensor([self.lengths[slot] for slot in rows]), list(rows)

    def sample(self, logits: Tensor, rows: Sequence[int], **options: Any) -> list[int]:
        """Sample ``rows`` and advance their positions."""
        output = self.sampler.sample(logits, *self.arguments(rows), **options)
        for slot in rows:
            self.lengths[slot] += 1
        tokens: list[int] = output.tokens.tolist()
        return tokens

    def distribution(self, logits: Tensor, rows: Sequence[int], **options: Any) -> Tensor:
        return self.sampler.distribution(logits, *self.arguments(rows), **options)


@pytest.fixture
def start() -> Start:
    return make_start


@pytest.fixture
def bench() -> type[Bench]:
    return Bench
