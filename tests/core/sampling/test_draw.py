"""Draws follow the distribution, also in its tails, and never hit what is impossible."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import NewSequenceData
from treadle.sampling.blocks import Blocks
from treadle.sampling.draw import argmax, draw
from treadle.sampling.noise import BITS
from treadle.sampling.sampler import Sampler

Follows = Callable[[Tensor, Tensor], None]
CPU = torch.device("cpu")
LAST = 1.0 - 2.0**-BITS
SIZES = [1, 2, 5, 127, 128, 129, 1000, 4096]


def samples(logits: Tensor, count: int, seed: int = 1, **params: float) -> Tensor:
    """Tokens of one slot at ``count`` positions."""
    sampler = Sampler(2, len(logits))
    start = NewSequenceData(0, SamplingParams(**params), 1, [0], seed, [], [])  # type: ignore[arg-type]
    sampler.add_sequences([start])
    token_ids = []
    for first in range(0, count, 4096):
        positions = torch.arange(first, min(count, first + 4096))
        rows = [0] * len(positions)
        batch = logits.expand(len(rows), -1).contiguous()
        token_ids.append(
            sampler.sample(batch, torch.zeros_like(positions), positions, rows).token_ids
        )
    return torch.cat(token_ids)


def bell(vocab: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_plain_draws(temperature: float, assert_follows: Follows) -> None:
    logits = bell(300, 1.5)
    expected = (logits.double() / temperature).softmax(-1)
    assert_follows(samples(logits, 100_000, temperature=temperature), expected)


def test_other_seeds_give_other_draws_of_the_same_distribution(assert_follows: Follows) -> None:
    logits = bell(50, 1.0)
    runs = [samples(logits, 20_000, seed=seed) for seed in range(4)]
    assert all(not torch.equal(runs[0], run) for run in runs[1:])
    assert_follows(torch.cat(runs), logits.double().softmax(-1))
    # Across seeds: the token at a position tells nothing about another seed's token there.
    best = logits.topk(7).indices
    kinds = [
        (run.unsqueeze(1) == best).long().argmax(1) + (run.unsqueeze(1) == best).any(1)
        for run in runs
    ]
    share = torch.bincount(kinds[0], minlength=8).double() / 20_000
    other_share = torch.bincount(kinds[1], minlength=8).double() / 20_000
    assert_follows(kinds[0] * 8 + kinds[1], (share.unsqueeze(1) * other_share).flatten())


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 20},
        {"top_k": 200},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 90, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=lambda params: ",".join(params),
)
def test_filtered_draws(
    params: dict[str, float], distribution: Callable[..., Tensor], assert_follows: Follows
) -> None:
    logits = bell(400, 1.2, seed=3)
    sampler = Sampler(2, 400)
    sampler.add_sequences([NewSequenceData(0, SamplingParams(**params), 1, [0], 1, [], [])])  # type: ignore[arg-type]
    expected = distribution(
        sampler, logits.unsqueeze(0), torch.tensor([0]), torch.tensor([0]), [0]
    )[0]
    assert int((expected > 0).sum()) < 400
    assert_follows(samples(logits, 25_000, **params), expected)


def test_tails(assert_follows: Follows) -> None:
    # One token in ten thousand is spread over 900 tokens: the rare ones are tested as one cell.
    probabilities = torch.full((1000,), 1e-4 / 900, dtype=torch.float64)
    probabilities[:100] = (1 - 1e-4) / 100
    token_ids = samples(probabilities.log().float(), 400_000)
    assert_follows(token_ids, probabilities)
    assert int((token_ids >= 100).sum()) in range(15, 75)  # 40 expected


def test_a_large_vocabulary(assert_follows: Follows) -> None:
    logits = bell(151_936, 2.0)
    expected = logits.double().softmax(-1)
    weights, blocks = logits.softmax(-1).unsqueeze(0), Blocks.of(151_936, CPU)
    uniforms = torch.rand(1500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    token_ids = torch.cat([draw(weights, u.unsqueeze(0), blocks)[0] for u in uniforms])
    # 32 bins of equal probability, of tokens in order of probability and in order of id
    for order in (logits.argsort(), torch.arange(151_936)):
        bins = torch.empty(151_936, dtype=torch.int64)
        bins[order] = (expected[order].cumsum(0) * 32).long().clamp(max=31)
        assert_follows(
            bins[token_ids], torch.zeros(32, dtype=torch.float64).scatter_add_(0, bins, expected)
        )


@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 2**31),
    support=st.sampled_from([1, 2, 3, 50]),
    ends=st.tuples(*[st.sampled_from([0.0, 2.0**-BITS, 0.5, LAST]) | st.floats(0, LAST)] * 2),
    exponent=st.sampled_from([0, -10, -20]),
)
def test_impossible_tokens_are_never_drawn(
    size: int, seed: int, support: int, ends: tuple[float, float], exponent: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(1, size)
    places = torch.randint(0, size, (support,), generator=generator)
    weights[0, places] = torch.rand(support, generator=generator) + 0.01
    weights /= weights.sum()
    # What filters leave of a row may be a small part of it.
    weights *= 2.0**exponent
    tokens, bad = draw(weights, torch.tensor([ends], dtype=torch.float64), Blocks.of(size, CPU))
    assert weights[0, tokens[0]] > 0
    assert not bad[0]


@pytest.mark.parametrize("size", SIZES)
def test_draws_invert_the_cumulative_distribution(size: int) -> None:
    """A grid over the unit square hits each token as often as its probability says."""
    weights = bell(size, 1.0, seed=size).softmax(-1)
    grid = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    uniforms = torch.cartesian_prod(grid, grid)
    blocks = Blocks.of(size, CPU)
    token_ids = torch.cat(
        [draw(weights.expand(len(u), -1), u, blocks)[0] for u in uniforms.split(2000)]
    )
    share = torch.bincount(token_ids, minlength=size).double() / len(token_ids)
    exact = weights.double()
    block = torch.arange(size) // blocks.width
    of_block = torch.zeros(blocks.count, dtype=torch.float64).scatter_add_(0, block, exact)[block]
    # An interval of length x holds x * 200 points of the grid, give or take one, on either level.
    bound = (of_block + exact / of_block) / 200 + 1 / 200**2 + 1e-6
    assert ((share - exact).abs() <= bound).all()


@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_argmax_is_the_first_maximum(size: int, seed: int, dtype: str) -> None:
    # Few different values: nearly every maximum is tied.
    logits = torch.randint(-3, 3, (3, size), generator=torch.Generator().manual_seed(seed)).to(
        getattr(torch, dtype)
    )
    tokens, bad = argmax(logits, Blocks.of(size, CPU))
    for row in range(3):
        assert int(tokens[row]) == logits[row].tolist().index(float(logits[row].max()))
    assert not bad.any()


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_k": 300}, {"top_p": 0.5}, {"min_p": 0.1}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unusable_rows_are_flagged(params: dict[str, float], dtype: torch.dtype) -> None:
    vocab = 500
    logits = bell(5 * vocab, 1.0).view(5, vocab).to(dtype)
    logits[0, 77] = float("nan")
    logits[1] = float("-inf")
    logits[2, 450] = float("inf")
    logits[3, 1:] = float("-inf")  # one possible token is enough
    sampler = Sampler(6, vocab)
    sampler.add_sequences(
        [NewSequenceData(slot, SamplingParams(**params), 1, [0], slot, [], []) for slot in range(5)]
    )  # type: ignore[arg-type]
    slots = torch.arange(5)
    output = sampler.sample(logits, slots, slots, list(range(5)))
    assert output.invalid.tolist() == [True, True, True, False, False]
    assert output.token_ids[3] == 0
    assert ((output.token_ids >= 0) & (output.token_ids < vocab)).all()
    usable_rows = sampler.sample(logits[3:], slots[3:], slots[3:], [3, 4])
    assert torch.equal(usable_rows.token_ids, output.token_ids[3:])
