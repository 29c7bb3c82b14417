"""Grammar bitmasks: bit order, row subsets, and masked tokens that are never sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.sampling.masks import apply_bitmask


def pack(allowed: Tensor) -> Tensor:
    """bool ``[rows, vocab]`` to int32 ``[rows, words]``, bit by bit."""
    rows, vocab = allowed.shape
    words = torch.zeros(rows, -(-vocab // 32), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= 1 << (token % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 257])
def test_bits(vocab: int) -> None:
    allowed = torch.rand(3, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.5
    logits = torch.randn(3, vocab)
    expected = logits.masked_fill(~allowed, float("-inf"))
    everywhere = logits.clone()
    apply_bitmask(everywhere, pack(allowed))
    assert torch.equal(everywhere, expected)
    some = logits.clone()
    apply_bitmask(some, pack(allowed)[[2, 0]], torch.tensor([2, 0]))
    assert torch.equal(some, torch.stack([expected[0], logits[1], expected[2]]))


def test_masked_tokens_are_not_sampled(bench: Any, start: Any) -> None:
    vocab = 70
    run = bench(vocab)
    run.open(start(0, temperature=0.0), start(1), start(2, top_p=0.9), start(3))
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, 65] = 30.0  # what nobody could avoid otherwise
    allowed = torch.zeros(3, vocab, dtype=torch.bool)
    allowed[:, [3, 33, 69]] = True
    rows = torch.tensor([0, 1, 2])
    for _ in range(50):
        tokens = run.sample(logits, [0, 1, 2, 3], bitmask=pack(allowed), bitmask_rows=rows)
        assert set(tokens[:3]) <= {3, 33, 69}
        assert tokens[3] == 65


def test_the_grammar_beats_the_bias(bench: Any, start: Any) -> None:
    run = bench(40)
    run.open(start(0, temperature=0.0, logit_bias={5: 100.0}))
    allowed = torch.zeros(1, 40, dtype=torch.bool)
    allowed[0, 6] = True
    assert run.sample(torch.zeros(1, 40), [0], bitmask=pack(allowed)) == [6]


def test_a_contradiction_is_flagged(bench: Any, start: Any) -> None:
    run = bench(40)
    run.open(
        start(0, allowed_token_ids=[3, 4]),
        start(1),
        start(2, temperature=0.0, allowed_token_ids=[9], words=[[9]]),
    )
    allowed = torch.zeros(1, 40, dtype=torch.bool)
    allowed[0, 6] = True
    slots, positions, rows = run.arguments([0, 1, 2])
    output = run.sampler.sample(
        torch.zeros(3, 40),
        slots,
        positions,
        rows,
        bitmask=pack(allowed),
        bitmask_rows=torch.tensor([0]),
    )
    assert output.invalid.tolist() == [True, False, True]
