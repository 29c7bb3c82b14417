"""The distribution that is sampled equals that of transformers' logits processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import NewSequenceData
from treadle.sampling.sampler import Sampler

VOCAB = 333  # no multiple of a block


def reference(start: NewSequenceData, logits: torch.Tensor) -> torch.Tensor:
    """Processors in the order of the module docstring of ``treadle.sampling.sampler``: ``[1, vocab]``."""
    p = start.params
    ids = torch.tensor([start.token_ids])
    outputs = torch.tensor([start.token_ids[start.num_prompt_tokens :]], dtype=torch.int64)
    x = logits.float()
    if p.allowed_token_ids is not None:
        forbidden = [token for token in range(VOCAB) if token not in p.allowed_token_ids]
        x = hf.SuppressTokensLogitsProcessor(forbidden)(ids, x) if forbidden else x
    if start.bad_words:
        x = hf.NoBadWordsLogitsProcessor(start.bad_words, eos_token_id=None)(ids, x)
    if p.min_tokens and start.stop_token_ids:
        x = hf.MinNewTokensLengthLogitsProcessor(
            start.num_prompt_tokens, p.min_tokens, start.stop_token_ids
        )(ids, x)
    if p.logit_bias:
        x = hf.SequenceBiasLogitsProcessor(
            [[[token], bias] for token, bias in p.logit_bias.items()]
        )(ids, x)
    if p.repetition_penalty != 1.0:
        x = hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, x)
    # OpenAI's definition; transformers has neither of the two.
    counts = torch.zeros_like(x).scatter_add_(1, outputs, torch.ones_like(outputs, dtype=x.dtype))
    x = x - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
    if p.temperature == 0.0:
        return torch.nn.functional.one_hot(x.argmax(-1), VOCAB).float()
    x = hf.TemperatureLogitsWarper(p.temperature)(ids, x)
    if p.top_k > 0:
        x = hf.TopKLogitsWarper(p.top_k)(ids, x)
    if p.top_p < 1.0:
        x = hf.TopPLogitsWarper(p.top_p)(ids, x)
    if p.min_p > 0.0:
        x = hf.MinPLogitsWarper(p.min_p)(ids, x)
    return x.softmax(-1)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual > 0, expected > 0), "another set of tokens is kept"
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def draw_logits(seed: int, rows: int, spread: float) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


token_ids = st.integers(0, VOCAB - 1)
few_tokens = st.integers(0, 11)  # so that prompts, outputs, words and biases meet
parameters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.5, 5.0]),
        "top_k": st.sampled_from(
            [-1, 0, 1, 2, 20, 31, 32, 33, 128, 129, 200, VOCAB - 1, VOCAB, 10**6]
        ),
        "top_p": st.sampled_from([1e-6, 0.1, 0.3, 0.5, 0.9, 0.95, 0.99]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.01, 0.1, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 2.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.7, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.3, 2.0]),
        "logit_bias": st.dictionaries(
            few_tokens, st.floats(-5, 5, width=32), min_size=1, max_size=5
        ),
        "allowed_token_ids": st.lists(token_ids, min_size=30, max_size=60, unique=True),
        "min_tokens": st.integers(1, 6),
    },
)


@st.composite
def requests(draw: Any, slot: int) -> NewSequenceData:
    tokens = draw(st.lists(few_tokens, min_size=1, max_size=12))
    words = st.lists(st.lists(few_tokens, min_size=1, max_size=4), max_size=4)
    return NewSequenceData(
        slot=slot,
        params=SamplingParams(**draw(parameters), max_tokens=100),
        num_prompt_tokens=draw(st.integers(1, len(tokens))),
        token_ids=tokens,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        stop_token_ids=draw(st.lists(few_tokens, max_size=3)),
        bad_words=draw(words),
    )


@given(
    starts=st.integers(1, 5).flatmap(lambda n: st.tuples(*(requests(slot=s) for s in range(n)))),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.5, 2.0, 6.0]),
)
def test_batches_of_any_parameters(
    distribution: Any, starts: tuple[NewSequenceData, ...], seed: int, spread: float
) -> None:
    sampler = Sampler(len(starts) + 1, VOCAB)
    sampler.add_sequences(starts)
    logits = draw_logits(seed, len(starts), spread)
    before = logits.clone()
    slots = torch.arange(len(starts))
    positions = torch.tensor([len(start.token_ids) for start in starts])
    actual = distribution(sampler, logits, slots, positions, list(range(len(starts))))
    for row, start in enumerate(starts):
        expected = reference(start, logits[row : row + 1])
        assert_same(actual[row : row + 1], expected)
    output = sampler.sample(logits, slots, positions, list(range(len(starts))))
    assert not output.invalid.any()
    assert (actual.gather(1, output.token_ids[:, None]) > 0).all()
    assert torch.equal(logits, before), "the caller's logits were modified"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"top_k": 7},
        {"top_k": 250},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 300, "top_p": 0.97, "min_p": 0.01, "temperature": 2.0},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {3: 4.0, 332: -100.0}},
        {"allowed_token_ids": [0, 5, 332]},
        {"min_tokens": 9},
    ],
    ids=lambda params: ",".join(params),
)
def test_each_parameter(params: dict[str, Any], distribution: Any) -> None:
    start = NewSequenceData(
        slot=1,
        params=SamplingParams(**params),
        num_prompt_tokens=3,
        token_ids=[1, 2, 3, 3, 4, 4, 4],
        seed=0,
        stop_token_ids=[8, 9],
        bad_words=[],
    )
    sampler = Sampler(4, VOCAB)
    sampler.add_sequences([start])
    logits = draw_logits(11, 1, 3.0)
    actual = distribution(sampler, logits, torch.tensor([1]), torch.tensor([7]), [1])
    expected = reference(start, logits)
    assert_same(actual, expected)
    # The parameter matters here: a test that passes without it proves nothing.
    assert not torch.allclose(expected, logits.softmax(-1))
