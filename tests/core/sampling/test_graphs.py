"""What a captured graph relies on: fixed operations, fixed addresses, nothing read back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import NewSequenceData
from treadle.sampling.features import Features
from treadle.sampling.sampler import Sampler

VOCAB = 300
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1e-9},
    {"temperature": 0.8},
    {"top_k": 5},
    {"top_k": 100},
    {"top_k": 200},
    {"top_k": VOCAB},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 250, "top_p": 0.9, "min_p": 0.01},
]
STATEFUL: list[dict[str, Any]] = [
    {"presence_penalty": 1.0},
    {"logit_bias": {3: 1.0}},
    {"allowed_token_ids": [1, 2]},
    {"logprobs": 2},
]


def make_sampler(kinds: list[dict[str, Any]], device: str = "cpu") -> Sampler:
    sampler = Sampler(len(kinds) + 1, VOCAB, device)
    sampler.add_sequences(
        [
            NewSequenceData(slot, SamplingParams(**kind), 2, [1, 2], slot, [0], [])
            for slot, kind in enumerate(kinds)
        ]
    )
    return sampler


def test_nothing_is_read_back_to_the_host() -> None:
    """Meta tensors have no values: any wait for the device, or branch on its data, raises here."""
    kinds = KINDS + STATEFUL
    sampler = make_sampler(kinds, "meta")
    sampler.add_sequences(
        [
            NewSequenceData(
                2, SamplingParams(min_tokens=3, logprobs=0), 1, [5], 0, [7], [[1, 2, 3], [4]]
            )
        ]
    )
    for rows in ([0, 1], [2], list(range(len(kinds)))):
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.empty(len(rows), VOCAB, dtype=dtype, device="meta")
            index = torch.empty(len(rows), dtype=torch.int64, device="meta")
            mask = torch.empty(1, 10, dtype=torch.int32, device="meta")
            output = sampler.sample(
                logits, index, index, rows, bitmask=mask, bitmask_rows=index[:1]
            )
            assert output.token_ids.shape == output.invalid.shape == (len(rows),)
            assert (output.token_ids.dtype, output.invalid.dtype) == (torch.int64, torch.bool)


def test_features_are_what_rows_ask_for() -> None:
    sampler = make_sampler(KINDS + STATEFUL)
    assert sampler.features([0, 1]) == Features(greedy=True)
    assert sampler.features([2, 6]) == Features(random=True)
    assert sampler.features([0, 3]) == Features(greedy=True, random=True, top_k=32)
    assert sampler.features([9]) == Features(random=True, top_k=32, top_p=True)
    assert sampler.features([7]) == Features(random=True, top_p=True, long_top_p=True)
    for slot in range(len(KINDS), len(KINDS) + len(STATEFUL)):
        assert sampler.features([2, slot]) is None
    sampler.remove_slots([len(KINDS)])
    assert sampler.features([len(KINDS)]) == Features(greedy=True)


def test_a_union_of_features_has_those_of_both() -> None:
    kinds = [Features.of(SamplingParams(**kind), VOCAB) for kind in KINDS]
    for first, second in itertools.product(kinds, kinds):
        union = first | second
        assert union | first == union == union | second
        assert union == second | first


def test_more_features_than_needed_change_no_token() -> None:
    sampler = make_sampler(KINDS)
    slots = torch.arange(len(KINDS))
    logits = torch.randn(len(KINDS), VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    unions = {Features.of(SamplingParams(**kind), VOCAB) for kind in KINDS}
    unions |= {first | second for first in unions for second in unions}
    for slot in range(len(KINDS)):
        slot_index = slots[slot : slot + 1]
        for position in range(5):
            expected = sampler.sample(
                logits[slot : slot + 1], slot_index, slot_index * 0 + position, [slot]
            ).token_ids
            features = sampler.features([slot])
            assert features is not None
            for union in unions:
                if union | features == union:
                    actual, _ = sampler.sample_graphable(
                        logits[slot : slot + 1], slot_index, slot_index * 0 + position, union
                    )
                    assert torch.equal(actual, expected), union


def test_padding_rows_change_nothing() -> None:
    sampler = make_sampler(KINDS)
    count = len(KINDS)
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(3))
    slots = torch.arange(count)
    features = sampler.features(list(range(count)))
    assert features is not None
    expected, _ = sampler.sample_graphable(logits, slots, slots, features)
    padded = torch.cat((logits, torch.full((3, VOCAB), float("nan"))))
    index = torch.cat((slots, torch.full((3,), count)))
    actual, bad = sampler.sample_graphable(padded, index, index, features)
    assert torch.equal(actual[:count], expected)
    assert bad.tolist() == [False] * count + [True] * 3


def addresses(sampler: Sampler) -> list[int]:
    tensors = [*vars(sampler._slots).values(), sampler.blocks.lanes]
    return [value.data_ptr() for value in tensors if isinstance(value, torch.Tensor)]


def test_tables_of_a_graph_stay_at_their_address() -> None:
    sampler = make_sampler(KINDS)
    before = addresses(sampler)
    assert len(before) == 2
    for slot in range(len(KINDS)):
        sampler.add_sequences(
            [
                NewSequenceData(
                    slot, SamplingParams(presence_penalty=1.0), 1, [5], 0, [7], [[1, 2, 3]]
                )
            ]
        )
    sampler.remove_slots(range(len(KINDS)))
    assert addresses(sampler) == before


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_captured_graph_samples_like_a_cpu(kind: dict[str, Any]) -> None:
    rows, vocab = 8, 151_936
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    starts = [
        NewSequenceData(slot, SamplingParams(**kind), 1, [0], slot, [], []) for slot in range(rows)
    ]
    cpu_sampler, cuda_sampler = Sampler(rows + 1, vocab), Sampler(rows + 1, vocab, "cuda")
    cpu_sampler.add_sequences(starts)
    cuda_sampler.add_sequences(starts)
    slots = torch.arange(rows)
    inputs = [t.cuda() for t in (logits, slots, slots)]
    features = cuda_sampler.features(list(range(rows)))
    assert features is not None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cuda_sampler.sample_graphable(inputs[0], inputs[1], inputs[2], features)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, bad = cuda_sampler.sample_graphable(inputs[0], inputs[1], inputs[2], features)
    for step in range(3):
        inputs[2].copy_(slots + step)
        graph.replay()
        expected = cpu_sampler.sample(logits, slots, slots + step, list(range(rows)))
        assert torch.equal(tokens.cpu(), expected.token_ids)
        assert not bad.any()
