"""Matchers of llguidance in other processes: the same masks, and what happens when a process does not answer."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llguidance")

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.plugins import PluginManager
from treadle.structured_output.batch import GrammarBatch
from treadle.structured_output.state import StructuredOutputState
from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle_structured_output_kit import matcher_pool
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler
from treadle_structured_output_kit.llguidance_matcher import LLGuidanceMatcher

TOKENIZER = SmallTokenizer()
SIZE = TOKENIZER.vocab_size
ROWS = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["a port of call", "an anchorage"]},
        "more": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "kind", "more"],
}


class Pool:
    """A compiler, shared masks, and matchers that advance in other processes."""

    def __init__(self, count: int = ROWS) -> None:
        self.compiler = LLGuidanceCompiler(TOKENIZER, SIZE, 8)
        self.masks = torch.zeros((ROWS, SIZE // 32 + 1), dtype=torch.int32).share_memory_()
        self.matchers = self.add(count)
        self.fill(self.matchers, range(count))  # which starts the processes
        self.rng = random.Random(0)

    def add(self, count: int) -> list[LLGuidanceMatcher]:
        self.grammar = self.compiler.compile_json_schema(SCHEMA)
        return [self.grammar.matcher() for _ in range(count)]

    def fill(self, matchers: Any, rows: Any) -> list[bool | None]:
        return self.compiler.fill_bitmasks(list(matchers), self.masks, list(rows))

    @property
    def processes(self) -> list[Any]:
        return self.compiler._pool._processes if self.compiler._pool else []

    def wait_for_processes(self) -> None:
        deadline = time.monotonic() + 60
        while not self.processes:
            assert time.monotonic() < deadline, "the processes do not start"
            time.sleep(0.01)

    def wait(self) -> None:
        """Until the matchers have moved."""
        self.wait_for_processes()
        self.fill(self.matchers, range(len(self.matchers)))
        assert all(matcher.place is not None for matcher in self.matchers)

    def allowed(self, row: int) -> list[int]:
        bits = np.unpackbits(self.masks[row].numpy().view(np.uint8), bitorder="little")
        return [int(i) for i in np.flatnonzero(bits[:SIZE])]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> type[Pool]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return Pool


def ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    for pid in pids:
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(pid, 0)
                time.sleep(0.01)
            return False
    return True


def test_masks_are_those_of_one_process_while_sequences_come_and_go(pool: type[Pool]) -> None:
    """Some steps have the rows of the one before, in others they have moved, or nobody asks for masks."""
    there, alone = pool(), LLGuidanceCompiler(TOKENIZER, SIZE)
    there.wait()
    grammar = alone.compile_json_schema(SCHEMA)
    pairs = [(matcher, grammar.matcher()) for matcher in there.matchers]
    expected = torch.zeros_like(there.masks)
    for step in range(60):
        if step % 4 == 3:
            there.rng.shuffle(pairs)
            del pairs[30:]
            pairs += [(m, grammar.matcher()) for m in there.add(there.rng.randrange(11))]
        moved, local = [m for m, _ in pairs], [m for _, m in pairs]
        if step % 5:
            accepting = there.fill(moved, range(len(pairs)))
            assert accepting == alone.fill_bitmasks(local, expected, range(len(pairs)))
            assert torch.equal(there.masks[: len(pairs)], expected[: len(pairs)])
        else:
            alone.fill_bitmasks(local, expected, range(len(pairs)))
            there.masks[:] = expected
        tokens = [there.rng.choice(there.allowed(row)) for row in range(len(pairs))]
        ends = there.compiler.accept_tokens(moved, tokens)
        assert ends == alone.accept_tokens(local, tokens) and None not in ends
        pairs = [pair for pair, has_ended in zip(pairs, ends, strict=True) if not has_ended]
    assert len({m.place.process for m, _ in pairs if m.place}) == 4
    assert [m.is_accepting for m, _ in pairs] == [m.is_accepting for _, m in pairs]
    assert [m.tokens for m, _ in pairs] == [m.tokens for _, m in pairs]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["ends", "hangs"])
@pytest.mark.parametrize("call", ["fill_bitmasks", "accept_tokens"])
def test_sequences_go_on_without_a_process_that_fails(
    pool: type[Pool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: signal.Signals,
    call: str,
) -> None:
    monkeypatch.setattr(matcher_pool, "ANSWER_SECONDS", 1)
    caplog.set_level(logging.WARNING)
    there = pool()
    there.wait()
    states = [StructuredOutputState(m, batches=there.compiler) for m in there.matchers]
    batch = GrammarBatch([(i, state, (), ()) for i, state in enumerate(states)])
    text = TOKENIZER.encode('{"name":"', add_special_tokens=False)
    victim = there.processes[1]
    for number, token in enumerate(text):
        if number == 3 and call == "fill_bitmasks":
            there.compiler._pool.settle()  # type: ignore[union-attr]
            os.kill(victim._pid, fault)
        batch.fill_bitmasks(there.masks, SIZE)
        assert all(token in there.allowed(row) for row in range(ROWS))
        if number == 3 and call == "accept_tokens":
            os.kill(victim._pid, fault)
        batch.accept_tokens([token] * ROWS)
        assert [state.error for state in states if state.error] == []
    assert not victim.is_alive and ended([victim._pid])
    assert "its 10 sequences go on without it" in caplog.text
    assert [m.place is None for m in there.matchers].count(True) == 10
    assert all(matcher.tokens == text for matcher in there.matchers)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["ends", "hangs"])
def test_the_sequence_that_costs_a_process_does_not_cost_the_engine(
    pool: type[Pool], monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    """In the engine the library would end or hang again. A process waits for ids while it fills a mask."""
    monkeypatch.setattr(matcher_pool, "ANSWER_SECONDS", 1)
    there = pool()
    there.wait()
    grammar = there.compiler.compile_regex("a text without any choice")
    matchers = [*there.matchers[:30], *(grammar.matcher() for _ in range(10))]
    states = [StructuredOutputState(m, batches=there.compiler) for m in matchers]
    broken: list[Any] = []

    def fail(text: bytes) -> list[int]:
        broken.append(next(p for p in there.processes if p._current[0] >= 0))
        os.kill(broken[0]._pid, fault)
        return []

    monkeypatch.setattr(there.processes[0], "_encode", fail)
    GrammarBatch([(i, s, (), ()) for i, s in enumerate(states)]).fill_bitmasks(there.masks, SIZE)
    failed = [i for i, state in enumerate(states) if state.error]
    assert len(failed) == 1 and failed[0] >= 30
    assert "llguidance ended or hung in a process of its own" in str(states[failed[0]].error)
    assert broken[0] is there.processes[0] and not broken[0].is_alive and ended([broken[0]._pid])
    assert all(p._current[0] == -1 for p in there.processes[1:])


def test_what_is_filled_ahead_never_lands_in_the_row_of_another(
    pool: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend as the engine has it: of the rows of this step, the next may give some to another backend."""
    there = pool()
    backend: Any = PluginManager().create_guarded(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=TOKENIZER, vocab_size=SIZE
    )
    there.compiler = backend._compiler
    there.matchers = there.add(ROWS)
    there.fill(there.matchers, range(ROWS))
    there.wait()
    states = [StructuredOutputState(m, batches=backend) for m in there.matchers]
    batch = GrammarBatch([(i, state, (), ()) for i, state in enumerate(states)])
    for token in TOKENIZER.encode('{"name":"' + "abc" * 9, add_special_tokens=False):
        batch.fill_bitmasks(there.masks, SIZE)
        assert token in there.allowed(ROWS - 1)
        batch.accept_tokens([token] * ROWS)
        backend.fill_bitmasks([], there.masks, [])
        there.masks.fill_(7)
        time.sleep(0.01)
        assert (there.masks == 7).all()
        backend.fill_bitmasks([], there.masks, [])  # as in a step without these rows


def test_processes_end_with_their_compiler(pool: type[Pool]) -> None:
    there = pool()
    there.wait()
    pids = [process._pid for process in there.processes]
    assert len(pids) == 4
    del there
    gc.collect()
    assert ended(pids)


def test_where_none_can_be_started_sequences_advance_here(
    pool: type[Pool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def spawn(entry: str) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(matcher_pool, "spawn", spawn)
    there = pool()
    for _ in range(3):
        assert None not in there.fill(there.matchers, range(ROWS))
        assert there.compiler.accept_tokens(there.matchers, [there.allowed(0)[0]] * ROWS)
    deadline = time.monotonic() + 30
    while "no more processes" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_few_rows_stay_here(pool: type[Pool]) -> None:
    there = pool()
    there.wait()
    few = there.add(3)
    there.fill(few, range(3))
    assert [matcher.place for matcher in few] == [None] * 3


def test_the_other_process_knows_what_was_done_here(pool: type[Pool]) -> None:
    """A token that a sequence gains by itself, and those that are undone."""
    there = pool()
    there.wait()
    matcher = there.matchers[0]
    begin, more = (TOKENIZER.encode(t, add_special_tokens=False) for t in ('{"na', "me"))
    for token in begin:
        there.fill(there.matchers, range(ROWS))
        there.compiler.accept_tokens(there.matchers, [token] * ROWS)
    for token in more:
        assert matcher.accept_token(token)
    assert matcher.place is None
    there.fill(there.matchers, range(ROWS))
    assert matcher.place is not None and matcher.tokens == begin + more
    assert more[0] not in there.allowed(0) and more[0] in there.allowed(1)
    matcher.rollback(2)
    there.fill(there.matchers, range(ROWS))
    assert matcher.tokens == begin and there.allowed(0) == there.allowed(1)


def test_what_a_grammar_costs_a_process_is_bounded(
    pool: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets the oldest grammars, and gets one again that comes back."""
    monkeypatch.setattr(matcher_pool, "MAX_GRAMMARS", 2)
    there = pool()
    there.wait()
    words = ["amber", "birch", "cedar", "dogwood"]
    grammars = [there.compiler.compile_regex(word) for word in words]
    for word, grammar in [*zip(words, grammars, strict=True)] * 2:
        matchers = [grammar.matcher() for _ in range(16)]
        assert None not in there.fill(matchers, range(16))
        texts = {TOKENIZER.token_bytes(token).decode() for token in there.allowed(15)}
        assert texts and all(word.startswith(text) for text in texts)
        assert all(matcher.place is not None for matcher in matchers)
    several = [grammars[i % 4].matcher() for i in (*range(16), 0, 1)]  # in one request
    for _ in range(2):
        assert None not in there.fill(several, range(18))
        for row in range(18):
            texts = {TOKENIZER.token_bytes(token).decode() for token in there.allowed(row)}
            assert texts and all(words[row % 16 % 4].startswith(text) for text in texts)
    assert all(process.is_alive for process in there.processes)


def test_a_process_that_nobody_asks_keeps_few_texts(
    pool: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen rows use some of the processes; the others are told of texts only when they are asked."""
    monkeypatch.setattr(matcher_pool, "MAX_TEXTS", 3)
    there = pool(1)
    there.wait_for_processes()
    for number in range(8):
        grammar = there.compiler.compile_regex(f"a text without a choice, number {number}")
        there.fill([grammar.matcher() for _ in range(16)], range(16))
    there.compiler._pool.settle()  # type: ignore[union-attr]
    counts = [len(process.texts) for process in there.processes]
    assert max(counts) == 3, counts


def test_a_tokenizer_that_fails_costs_no_sequence_its_mask(
    pool: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that has asked cannot go on; what the engine then finds is its to tell."""
    there = pool()
    there.wait()

    def fail(text: bytes) -> list[int]:
        raise KeyError("no ids today")

    for process in there.processes:
        monkeypatch.setattr(process, "_encode", fail)
    grammar = there.compiler.compile_regex("a text without any choice")
    matchers = [grammar.matcher() for _ in range(20)]
    results = there.fill(matchers, range(20))
    asked = [m for m, result in zip(matchers, results, strict=True) if result is None]
    assert asked and all(matcher.place is None for matcher in asked)
    assert None not in there.fill(matchers, range(20))
