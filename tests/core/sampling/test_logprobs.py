"""Log probabilities are those of the raw logits, for the rows that asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from treadle.api.step_types import TokenLogprobs
from treadle.sampling.logprobs import prompt_logprobs

TOLERANCE = 1e-5


def check(entry: TokenLogprobs, logits: torch.Tensor, token: int, k: int) -> None:
    exact = logits.double().log_softmax(-1)
    assert entry.ids[0] == token
    assert len(entry.ids) == len(entry.logprobs) == 1 + k
    torch.testing.assert_close(
        torch.tensor(entry.logprobs, dtype=torch.float64), exact[entry.ids], rtol=0, atol=TOLERANCE
    )
    assert entry.rank == 1 + int((logits > logits[token]).sum())
    best = exact.topk(k).values if k else exact[:0]
    torch.testing.assert_close(exact[entry.ids[1:]], best, rtol=0, atol=TOLERANCE)
    assert len(set(entry.ids[1:])) == k


@pytest.mark.parametrize("vocab", [25, 1000, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_ask(bench: Any, start: Any, vocab: int, dtype: torch.dtype) -> None:
    run = bench(vocab)
    run.open(
        start(0, logprobs=0),
        start(1),
        start(2, logprobs=20, temperature=0.0, logit_bias={4: 50.0}),
        start(3, logprobs=3, top_k=2, presence_penalty=2.0, temperature=0.3),
    )
    logits = (torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 5).to(dtype)
    output = run.sampler.sample(logits, *run.arguments([3, 1, 0, 2]))
    assert output.logprobs is not None
    assert output.logprobs.rows == [0, 2, 3]
    entries = output.logprobs.cpu().to_host()
    assert output.token_ids[3] == 4
    for row, k, entry in zip([0, 2, 3], [3, 0, 20], entries, strict=True):
        check(entry, logits[row].float(), int(output.token_ids[row]), k)


def test_a_plugins_edits_do_not_show(bench: Any, start: Any) -> None:
    run = bench(30)
    run.open(start(0, logprobs=1, temperature=0.0))
    raw = torch.randn(1, 30)
    edited = torch.zeros(1, 30)
    edited[0, 11] = 1.0
    output = run.sampler.sample(edited, *run.arguments([0]), raw=raw)
    assert output.logprobs is not None
    check(output.logprobs.to_host()[0], raw[0], 11, 1)


@pytest.mark.parametrize("k", [0, 1, 20])
def test_prompt(k: int) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(k)) * 3
    before = logits.clone()
    targets = [3, 499, 0, 7, 7, int(logits[5].argmax())]
    entries = prompt_logprobs(logits, torch.tensor(targets), k).to_host()
    for row, (entry, token) in enumerate(zip(entries, targets, strict=True)):
        check(entry, logits[row], token, k)
    assert entries[5].rank == 1
    assert torch.equal(logits, before)


def test_large_logits_keep_their_precision() -> None:
    logits = torch.tensor([[1000.0, 999.0, -1000.0, float("-inf")]])
    entry = prompt_logprobs(logits, torch.tensor([1]), 2).to_host()[0]
    assert entry.logprobs[0] == pytest.approx(-1.3132617, abs=1e-5)
    assert entry.ids == [1, 0, 1]


def test_more_alternatives_than_tokens() -> None:
    entry = prompt_logprobs(torch.zeros(1, 3), torch.tensor([2]), 20).to_host()[0]
    assert entry.ids[0] == 2
    assert sorted(entry.ids[1:]) == [0, 1, 2]
