"""Thresholds keep exactly the tokens that the definitions by sorting keep, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treadle.sampling.blocks import Blocks
from treadle.sampling.thresholds import HEAD, apply_filters, search, select, top_p_threshold

CPU = torch.device("cpu")


def oracle(probs: Tensor, k: int, p: float, min_p: float) -> Tensor:
    """Kept tokens (bool ``[vocab]``) by sorting; tokens of equal probability go together."""
    mask = probs >= probs.sort(descending=True).values[min(k, len(probs)) - 1]
    if p < 1:
        values = (probs * mask).double()
        budget = float(values.sum()) * p
        # Few different values, so that this stays quadratic only in name.
        above = {float(v): float(values[values > v].sum()) for v in values.unique()}
        mask &= torch.tensor([above[float(v)] < budget for v in values])
    return mask & (probs >= probs.max() * min_p)


def coarse(seed: int, vocab: int, levels: int) -> Tensor:
    """A distribution of few different values, in which most tokens are tied.

    The levels are powers of two: sums are exact, so that the oracle's rounding decides nothing.
    """
    picks = torch.randint(0, levels, (vocab,), generator=torch.Generator().manual_seed(seed))
    return torch.pow(2.0, -picks.float() - 10)


def filters(probs: Tensor, k: int, p: float, min_p: float, *, long: bool) -> Tensor:
    probs = probs.unsqueeze(0).clone()
    vocab = probs.shape[1]
    k = min(k, vocab)
    apply_filters(
        probs,
        torch.empty_like(probs),
        Blocks.of(vocab, CPU),
        top_k=(torch.tensor([[k]]), HEAD + 1 if long else min(k, HEAD)) if k < vocab else None,
        top_p=(torch.tensor([[p]], dtype=torch.float64), not long and k <= HEAD) if p < 1 else None,
        min_p=torch.tensor([[min_p]]) if min_p else None,
    )
    return probs[0]


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 2, 7, 128, 500, 20_000]),
    levels=st.sampled_from([1, 2, 5, 20]),
    k=st.sampled_from([1, 2, 5, 31, 64, 127, 128, 10**9]),
    p=st.sampled_from([1e-9, 0.125, 0.5, 0.75, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.25, 1.0]),
)
def test_kept_sets(seed: int, vocab: int, levels: int, k: int, p: float, min_p: float) -> None:
    probs = coarse(seed, vocab, levels)
    expected = oracle(probs, k, p, min_p)
    for long in (False, True):  # a list of the largest, a search
        actual = filters(probs, k, p, min_p, long=long)
        assert torch.equal(actual, probs * expected), (
            "kept set" if long else "kept set from the list"
        )
    assert expected[probs.argmax()]


@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([3, 1000, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    ps=st.lists(st.floats(0.001, 0.9999), min_size=3, max_size=3),
)
def test_the_three_ways_to_a_nucleus_agree(
    seed: int, vocab: int, spread: float, ps: list[float]
) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    probs = logits.softmax(-1)
    budget = probs.sum(-1, keepdim=True, dtype=torch.float64) * torch.tensor(
        ps, dtype=torch.float64
    ).unsqueeze(1)
    searched = search(
        probs,
        torch.empty_like(probs),
        lambda mask: (probs * mask).sum(-1, keepdim=True, dtype=torch.float64) >= budget,
    )
    assert torch.equal(searched, top_p_threshold(probs, budget, Blocks.of(vocab, CPU)))
    for row in range(3):
        assert torch.equal(searched[row, 0], select(probs[row], float(budget[row])))
        # transformers' definition: ascending order, drop while the cumulative mass is at most 1 - p
        values = probs[row].double().sort().values
        nucleus = values[values.cumsum(0) > values.sum() - budget[row]]
        assert float(searched[row, 0]) == float(nucleus[0] if len(nucleus) else values[-1])


@pytest.mark.parametrize("size", [10, 3000])
def test_a_nucleus_of_equal_probabilities_is_everything(size: int) -> None:
    probs = torch.full((size,), 1 / size)
    assert (filters(probs, 10**9, 0.1, 0.0, long=True) > 0).all()


def test_a_nucleus_of_nearly_everything() -> None:
    # The budget may exceed every cumulative sum by a rounding error; nothing must fall off the end.
    probs = (torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)) * 4).softmax(-1)
    budget = probs.sum(-1, keepdim=True, dtype=torch.float64) * (1 + 1e-12)
    assert float(select(probs[0], float(budget))) == float(probs.min())
    assert float(top_p_threshold(probs, budget, Blocks.of(50_000, CPU))) == float(probs.min())


def test_rows_that_ask_for_nothing_are_untouched() -> None:
    probs = (torch.randn(2, 700, generator=torch.Generator().manual_seed(1)) * 9).softmax(-1)
    for max_k in (32, HEAD, HEAD + 1):
        filtered = probs.clone()
        apply_filters(
            filtered,
            torch.empty_like(probs),
            Blocks.of(700, CPU),
            top_k=(torch.tensor([[3], [700]]), max_k),
            top_p=(torch.tensor([[0.5], [1.0]], dtype=torch.float64), max_k <= HEAD),
            min_p=torch.tensor([[0.9], [0.0]]),
        )
        assert torch.equal(filtered[1], probs[1])
        assert int((filtered[0] > 0).sum()) <= 3


def test_a_budget_that_is_met_exactly() -> None:
    """top_p 0.5 of (0.5, 0.25, 0.25): the first token is enough, and a hair more takes the ties."""
    probs = torch.tensor([0.25, 0.5, 0.25])
    for long in (False, True):
        assert filters(probs, 2, 0.5, 0.0, long=long).tolist() == [0.0, 0.5, 0.0]
        assert filters(probs, 2, 0.5000001, 0.0, long=long).tolist() == [0.25, 0.5, 0.25]
    mask = torch.empty(1, 3)
    for p, expected in ((0.5, 0.5), (0.5000001, 0.25)):
        budget = torch.tensor([[p]], dtype=torch.float64)
        threshold = search(
            probs.unsqueeze(0),
            mask,
            lambda m, budget=budget: (
                (probs * m).sum(-1, keepdim=True, dtype=torch.float64) >= budget
            ),  # type: ignore[misc]
        )
        assert float(threshold) == expected


def test_selection_at_and_around_every_level() -> None:
    # Powers of two: sums are exact, so that a budget can be met exactly at each of the levels.
    values = coarse(3, 6000, 12)
    for level in values.unique().tolist():
        at_least = float(values[values >= level].sum(dtype=torch.float64))
        above = float(values[values > level].sum(dtype=torch.float64))
        for budget in (
            at_least,
            at_least * (1 - 1e-6),
            (at_least + above) / 2,
            above * (1 + 1e-6) or 1e-9,
        ):
            assert float(select(values, budget)) == level
