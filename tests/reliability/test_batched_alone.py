"""A short run of ``batched_alone.py``, and what it says of outputs that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from batched_alone import ALONE, Comparison, Engine, compare, engines, requests, run

from treadle.outputs import CompletionOutput, Logprob

CROWDED = Engine(
    enable_prefix_caching=True,
    chunked_prefill_size=16,
    num_pages=24,
    max_num_seqs=16,
    max_num_batched_tokens=64,
)


def test_requests_get_in_a_crowd_what_they_get_alone() -> None:
    with ALONE.open() as llm:
        batch = requests(8, 0, range(300, llm.info.vocab_size))
        alone = [run(llm, [request])[0] for request in batch]
    comparison = Comparison()
    with CROWDED.open() as llm:
        for i, output in enumerate(run(llm, batch)):
            compare(str(i), alone[i], output, comparison)
        assert llm.stats.num_preemptions > 0
    assert comparison.faults == []
    assert comparison.num_tokens > 100


def test_every_mix_is_another_engine() -> None:
    assert len(set(engines())) == len(list(engines())) == 54


def output(*tokens: int, logprob: float = -1.0, other: float = -2.0) -> CompletionOutput:
    position = [{token: Logprob(logprob), token + 1: Logprob(other)} for token in tokens]
    return CompletionOutput(
        index=0, text="text", token_ids=list(tokens), logprobs=position, finish_reason="stop"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda good: msgspec.structs.replace(good, text="other"),
        lambda good: msgspec.structs.replace(good, finish_reason="length"),
        lambda good: msgspec.structs.replace(good, logprobs=None, error="it failed"),
        lambda good: output(1, 2),
        lambda good: output(1, 2, 3, 4),
        lambda good: output(1, 2, 9),
        lambda good: output(1, 2, 4),
        lambda good: output(1, 2, 3, logprob=-1.001),
        lambda good: output(1, 2, 3, logprob=float("nan")),
    ],
)
def test_what_differs_is_a_fault(change: Callable[[CompletionOutput], CompletionOutput]) -> None:
    comparison = Comparison()
    compare("it", output(1, 2, 3), change(output(1, 2, 3)), comparison)
    assert len(comparison.faults) == 1


def test_a_token_that_is_as_good_is_a_tie() -> None:
    comparison = Comparison()
    compare("it", output(1, 2, 3, other=-1.0001), output(1, 2, 4), comparison)
    assert (comparison.num_ties, comparison.faults) == (1, [])
