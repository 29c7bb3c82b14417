"""What slots remember over several steps: penalties, bad words, min_tokens, reuse, preemption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.api.step_types import NewSequenceData
from treadle.sampling.sampler import Sampler
from treadle.sampling.transfer import Packer

VOCAB = 40
# A request that takes every path with a memory.
EVERYTHING: dict[str, Any] = {
    "words": [[3], [1, 2], [2, 1, 4], [5, 5, 5, 5]],
    "stop_ids": [0, 7],
    "min_tokens": 6,
    "max_tokens": 100,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {1: 2.0, 9: -3.0},
    "seed": 77,
}


def flat(rows: int = 1) -> Tensor:
    return torch.zeros(rows, VOCAB)


def steps(count: int, rows: int = 1, spread: float = 1.5) -> list[Tensor]:
    """Logits that prefer ids below 8, so that words and repetitions come about."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(count, rows, VOCAB, generator=generator) * spread
    logits[..., :8] += 2.5
    return list(logits)


def test_frequency_counts_outputs_of_earlier_steps(bench: Any, start: Any) -> None:
    run = bench(VOCAB)
    run.open(start(0, tokens=[1, 1, 1], temperature=0.0, frequency_penalty=1.0))
    logits = flat()
    logits[0, 1], logits[0, 2] = 2.5, 1.9
    # 1: 2.5, 1.5, 0.5, -0.5 after 0, 1, 2, 3 times; 2: 1.9, 0.9, -0.1; the prompt does not count.
    assert [run.sample(logits, [0])[0] for _ in range(5)] == [1, 2, 1, 2, 1]


def test_presence_is_paid_once_and_repetition_counts_the_prompt(bench: Any, start: Any) -> None:
    run = bench(VOCAB)
    run.open(
        start(0, temperature=0.0, presence_penalty=1.0),
        start(1, tokens=[1], temperature=0.0, repetition_penalty=2.0),
        start(2, tokens=[30], temperature=0.0, repetition_penalty=2.0),
    )
    logits = flat(3)
    logits[:, 1], logits[:, 2] = 3.0, 2.5
    assert run.sample(logits, [0, 1, 2]) == [1, 2, 1]
    # Slot 0: 2.0 against 2.5. Slots 1 and 2 hold both tokens or one: 1.5 and 1.25, 1.5 and 2.5.
    assert run.sample(logits, [0, 1, 2]) == [2, 1, 2]
    # Slot 0: 2.0 against 1.5, and it stays so.
    assert [run.sample(logits, [0, 1, 2])[0] for _ in range(3)] == [1, 1, 1]


def test_words_of_several_tokens(bench: Any, start: Any) -> None:
    run = bench(VOCAB)
    run.open(start(0, tokens=[8], words=[[1, 1, 1]], temperature=0.0))
    logits = flat()
    logits[0, 1], logits[0, 2] = 2.0, 1.0
    assert [run.sample(logits, [0])[0] for _ in range(7)] == [1, 1, 2, 1, 1, 2, 1]


def test_a_word_may_begin_in_the_prompt(bench: Any, start: Any) -> None:
    run = bench(VOCAB)
    run.open(
        start(0, tokens=[4, 5], words=[[4, 5, 6]], temperature=0.0),
        start(1, tokens=[5], words=[[4, 5, 6]], temperature=0.0),
        start(2, tokens=[5, 4], words=[[4, 5, 6], [9, 9, 9, 9, 9, 9]], temperature=0.0),
    )
    logits = flat(3)
    logits[:, 6] = 1.0
    assert run.sample(logits, [0, 1, 2]) == [0, 6, 6]


def test_a_longer_word_of_a_later_slot_keeps_the_memory_of_earlier_ones(
    bench: Any, start: Any
) -> None:
    run = bench(VOCAB)
    run.open(start(0, tokens=[4, 5], words=[[4, 5, 6]], temperature=0.0))
    run.open(*(start(slot, words=[[7] * 9, [1, 2]], temperature=0.0) for slot in range(1, 12)))
    logits = flat()
    logits[0, 6] = 1.0
    assert run.sample(logits, [0]) == [0]


def test_min_tokens_end(bench: Any, start: Any) -> None:
    run = bench(VOCAB)
    run.open(start(0, tokens=[3, 3], stop_ids=[9], min_tokens=3, temperature=0.0))
    logits = flat()
    logits[0, 9] = 1.0
    assert [run.sample(logits, [0])[0] for _ in range(4)] == [0, 0, 0, 9]


@pytest.mark.parametrize("cut", [1, 4, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_changes_nothing(bench: Any, start: Any, cut: int, temperature: float) -> None:
    """A slot opened with prompt and outputs continues like one that was never closed."""
    logits, prompt = steps(14), [1, 2, 2, 30]
    reference = bench(VOCAB)
    reference.open(start(3, tokens=prompt, temperature=temperature, **EVERYTHING))
    expected = [reference.sample(x, [3])[0] for x in logits]
    assert len(set(expected)) > 3

    parts = bench(VOCAB)
    parts.open(start(3, tokens=prompt, temperature=temperature, **EVERYTHING))
    actual = [parts.sample(x, [3])[0] for x in logits[:cut]]
    parts.sampler.remove_slots([3])
    # Somebody else uses the slot, and the rows of the tables, meanwhile.
    parts.open(*(start(s, tokens=[2, 5], words=[[2, 5, 1]], presence_penalty=2.0) for s in (3, 8)))
    parts.sample(flat(2), [8, 3])
    parts.sampler.remove_slots([3])
    resumed = start(
        11, tokens=prompt + actual, prompt_len=len(prompt), temperature=temperature, **EVERYTHING
    )
    parts.open(resumed)
    actual += [parts.sample(x, [11])[0] for x in logits[cut:]]
    assert actual == expected


def test_every_row_is_as_if_it_were_alone(bench: Any, start: Any) -> None:
    """Any parameters side by side, in changing batches, while tables grow."""
    generator = torch.Generator().manual_seed(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_k": 140},
        {"top_p": 0.6},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.05},
        {"min_p": 0.2},
        {"presence_penalty": 1.0},
        {"words": [[1, 2], [4]]},
        {"allowed_token_ids": [1, 2, 3, 4, 150]},
        {**EVERYTHING, "temperature": 0.9},
        {"logprobs": 3, "temperature": 1.4},
    ]
    vocab, count = 200, 8
    logits = torch.randn(len(kinds), count, vocab, generator=generator) * 2
    logits[..., :8] += 2
    starts = [
        start(slot, tokens=[1, 2, slot], **{"seed": slot, **kind})
        for slot, kind in enumerate(kinds)
    ]
    expected = []
    for slot, start_data in enumerate(starts):
        run = bench(vocab)
        run.open(start_data)
        expected.append([run.sample(logits[slot, i : i + 1], [slot])[0] for i in range(count)])

    run = bench(vocab)
    token_ids: list[list[int]] = [[] for _ in kinds]
    while any(len(tokens) < count for tokens in token_ids):
        waiting = [slot for slot, tokens in enumerate(token_ids) if len(tokens) < count]
        order = torch.randperm(len(waiting), generator=generator).tolist()
        rows = [waiting[i] for i in order[: int(torch.randint(1, 9, (), generator=generator))]]
        fresh = [starts[slot] for slot in rows if slot not in run.lengths]
        run.open(*fresh)
        batch = torch.stack([logits[slot, len(token_ids[slot])] for slot in rows])
        for slot, token in zip(rows, run.sample(batch, rows), strict=True):
            token_ids[slot].append(token)
            if len(token_ids[slot]) == count:
                run.sampler.remove_slots([slot])
    assert token_ids == expected


def test_a_reused_slot_forgets_its_predecessor(bench: Any, start: Any) -> None:
    run = bench(VOCAB)
    run.open(
        start(
            0,
            temperature=0.0,
            allowed_token_ids=[4],
            words=[[1, 2]],
            frequency_penalty=2.0,
            logprobs=2,
        )
    )
    logits = flat()
    logits[0, 1] = 1.0
    assert run.sample(logits, [0]) == [4]
    run.open(start(0, temperature=0.0))  # without a close
    assert run.sample(logits, [0]) == [1]
    assert run.sampler.sample(logits, *run.arguments([0])).logprobs is None
    run.sampler.remove_slots([0, 0, 5])
    assert run.sample(logits, [0]) == [1]


def test_an_unopened_slot_is_greedy() -> None:
    sampler = Sampler(3, VOCAB)
    logits = flat(2)
    logits[:, 17] = 1.0
    slots = torch.tensor([2, 2])
    assert sampler.sample(logits, slots, slots * 0, [2, 2]).token_ids.tolist() == [17, 17]


def test_foreign_ids_that_cannot_be_sampled_are_harmless(bench: Any, start: Any) -> None:
    """Placeholders in a prompt, stop ids of a larger tokenizer, words with such tokens."""
    run = bench(VOCAB)
    run.open(
        start(
            0,
            tokens=[1, VOCAB + 100, -1, 2],
            stop_ids=[VOCAB, 3],
            words=[[VOCAB + 1], [1, VOCAB], [VOCAB, 4]],
            min_tokens=2,
            repetition_penalty=2.0,
            temperature=0.0,
        )
    )
    logits = flat()
    logits[0, :4] = torch.tensor([1.0, 1.5, 1.5, 5.0])
    assert run.sample(logits, [0]) == [0]
    assert run.sample(logits, [0]) == [1]  # 0 was sampled: 0.5 each for 0, 0.75 for 1 and 2


def table_bytes(sampler: Sampler) -> int:
    tensors = [value for table in sampler._logits_edits for value in vars(table).values()]
    return sum(value.nbytes for value in tensors if isinstance(value, Tensor))


def test_tables_grow_only_for_those_who_ask(start: Any) -> None:
    sampler = Sampler(300, VOCAB)
    sampler.add_sequences([start(slot, top_p=0.5, top_k=3, logprobs=1) for slot in range(299)])
    assert table_bytes(sampler) == 0
    starts = [start(7, allowed_token_ids=[1], **EVERYTHING)]
    sampler.add_sequences(starts)
    small = table_bytes(sampler)
    assert 0 < small < 4 * (5 * VOCAB + 2000) * 8
    for _ in range(10):
        sampler.add_sequences(starts)
    assert table_bytes(sampler) == small


def test_one_transfer_opens_any_number_of_slots(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    upload = Packer.upload

    def counted(packer: Packer, *arrays: np.ndarray) -> list[Tensor]:
        calls.append(len(arrays))
        return upload(packer, *arrays)

    monkeypatch.setattr(Packer, "upload", counted)
    sampler = Sampler(9, VOCAB)
    starts: list[NewSequenceData] = [start(slot, tokens=[1, 2], **EVERYTHING) for slot in range(8)]
    sampler.add_sequences(starts)
    assert len(calls) == 1
    sampler.add_sequences([])
    assert len(calls) == 1
