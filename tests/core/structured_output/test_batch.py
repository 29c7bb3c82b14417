"""Backends that advance many sequences at once: what fails is paid for by as few as can be."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from treadle.api.sampling_params import StructuredOutputsParams
from treadle.sampling.sampler import Sampler
from treadle.structured_output import StructuredOutputManager
from treadle.structured_output.batch import GrammarBatch, GrammarRow
from treadle.structured_output.state import StructuredOutputState
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler

VOCAB = 64
ROOM = VOCAB // 32 + 1


class Counting:
    """Allows its own number, and refuses every other token."""

    is_accepting = is_terminated = False

    def __init__(self, number: int, fails: bool = False) -> None:
        self.number, self.fails, self.num_accepted = number, fails, 0

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        if self.fails:
            raise KeyError("oh")
        assert bitmask.shape[1] >= VOCAB // 32
        bitmask[row] = 0
        bitmask[row, self.number // 32] = 1 << self.number % 32

    def accept_token(self, token: int) -> bool:
        self.num_accepted += token == self.number
        return token == self.number

    def rollback(self, count: int) -> None:
        raise NotImplementedError


class Backend:
    """Does for each matcher what that would do; ``replies`` takes its answers."""

    def __init__(self, replies: Callable[[list[Any]], Any] = lambda answers: answers) -> None:
        self.replies, self.calls = replies, 0

    def fill_bitmasks(
        self, matchers: Sequence[Counting], bitmask: torch.Tensor, rows: Sequence[int]
    ) -> Any:
        self.calls += 1
        for matcher, row in zip(matchers, rows, strict=True):
            bitmask[row] = 0
            bitmask[row, matcher.number // 32] = 1 << matcher.number % 32
            bitmask[row, -1] = 1  # the id after the vocabulary
        return self.replies([None if matcher.fails else False for matcher in matchers])

    def accept_tokens(self, matchers: Sequence[Counting], tokens: Sequence[int]) -> Any:
        self.calls += 1
        accepted = [m.accept_token(t) for m, t in zip(matchers, tokens, strict=True)]
        return self.replies([False if ok else None for ok in accepted])


def raising(answers: list[Any]) -> Any:
    raise RuntimeError("no batch today")


def states(backend: Any, *matchers: Counting) -> list[StructuredOutputState]:
    return [StructuredOutputState(matcher, batches=backend) for matcher in matchers]  # type: ignore[arg-type]


def batch(rows: list[StructuredOutputState]) -> GrammarBatch:
    return GrammarBatch([(i, state, (), ()) for i, state in enumerate(rows)])


def masks(rows: list[StructuredOutputState]) -> list[set[int]]:
    bitmask = torch.full((len(rows), ROOM), -1, dtype=torch.int32)
    batch(rows).fill_bitmasks(bitmask, VOCAB)
    return [{i for i in range(VOCAB) if int(m[i // 32]) >> (i % 32) & 1} for m in bitmask]


def test_sequences_of_a_backend_advance_in_one_call() -> None:
    first, second = Backend(), Backend()
    rows = states(first, Counting(3), Counting(40)) + states(second, Counting(5))
    rows += states(None, Counting(6))
    assert masks(rows) == [{3}, {40}, {5}, {6}]
    batch(rows).accept_tokens((3, 40, 5, 6))
    assert (first.calls, second.calls) == (2, 2)
    assert not any(state.has_ended for state in rows)
    assert [state.matcher.num_accepted for state in rows] == [1] * 4  # type: ignore[attr-defined]


def test_one_that_fails_is_named_by_itself() -> None:
    rows = states(Backend(), Counting(3), Counting(4, fails=True), Counting(5))
    assert masks(rows) == [{3}, set(), {5}]
    assert [state.error for state in rows] == [None, "the grammar failed: KeyError: 'oh'", None]
    batch([rows[0], rows[2]]).accept_tokens((3, 9))
    assert rows[0].error is None and "does not allow token 9" in str(rows[2].error)


@pytest.mark.parametrize("replies", [raising, lambda answers: answers[1:]], ids=["raises", "short"])
def test_a_batch_that_fails_is_filled_row_by_row(
    replies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from treadle.api.result_checks import one_for_each_matcher

    class Checked(Backend):
        """As behind the boundary, which checks what a plugin returns."""

        def fill_bitmasks(self, matchers: Any, bitmask: Any, rows: Any) -> Any:
            return one_for_each_matcher(super().fill_bitmasks(matchers, bitmask, rows), matchers)

    caplog.set_level(logging.WARNING)
    rows = states(Checked(replies), Counting(3), Counting(4))
    assert masks(rows) == [{3}, {4}]
    assert "each row is filled by itself" in caplog.text


def test_nobody_knows_who_has_advanced_when_accepting_raises() -> None:
    rows = states(Backend(raising), Counting(3), Counting(4)) + states(Backend(), Counting(5))
    batch(rows).accept_tokens((3, 4, 5))
    assert [state.has_ended for state in rows] == [True, True, False]
    assert all("no batch today" in str(state.error) for state in rows[:2])


def test_while_a_sequence_reasons_it_is_in_no_batch() -> None:
    backend = Backend()
    state = StructuredOutputState(
        Counting(3),
        lambda token: token != 9,
        batches=backend,  # type: ignore[arg-type]
    )
    for token in (7, 8, 9):
        assert masks([state]) == [set(range(VOCAB))]
        batch([state]).accept_tokens([token])
    assert backend.calls == 0
    assert masks([state]) == [{3}] and backend.calls == 1
    batch([state]).accept_tokens([3])
    assert backend.calls == 2 and state.matcher.num_accepted == 1  # type: ignore[attr-defined]


def test_a_sequence_that_comes_leaves_the_masks_of_a_step_alone(engine: Callable[..., Any]) -> None:
    """A device may still read them: only the output of their step says that it has."""
    manager = engine().core._structured_output
    in_step, coming = states(Backend(), Counting(3)) + states(None, Counting(4))
    masks_of_step = manager.bitmasks(batch([in_step])).bitmask
    before = bytes(masks_of_step)
    coming.check_first_token(VOCAB, (), (4,))
    assert coming.error_param == "bad_words" and bytes(masks_of_step) == before


@pytest.mark.parametrize("is_full", [False, True])
def test_masks_for_a_gpu_are_shared_if_there_is_room(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    core = engine().core
    if is_full:

        def share(_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("unable to allocate shared memory: No space left on device (28)")

        monkeypatch.setattr(torch.Tensor, "share_memory_", share)
    info = msgspec.structs.replace(core.info, device="cuda:0")
    manager = StructuredOutputManager(core.config, core.plugins, info)
    try:
        rows = states(Backend(), Counting(3), Counting(4))
        assert manager._bitmask.is_shared() is not is_full
        output = manager.bitmasks(batch(rows))
        assert output is not None and output.rows == [0, 1]
    finally:
        manager.close()


def test_a_row_that_fails_leaves_those_of_its_step_alone(engine: Callable[..., Any]) -> None:
    manager = engine(max_num_seqs=96).core._structured_output
    rows = states(Backend(), *(Counting(i % 30) for i in range(95)), Counting(4, fails=True))
    output = manager.bitmasks(batch(rows))
    words = torch.frombuffer(output.bitmask, dtype=torch.int32).view(96, -1)
    assert output.rows == list(range(96))
    assert words[:95, 0].tolist() == [1 << i % 30 for i in range(95)]
    assert not words[95, : VOCAB // 32].any() and "oh" in str(rows[95].error)
    assert not any(state.error for state in rows[:95])


def test_rows_that_go_on_are_gathered_once(engine: Callable[..., Any]) -> None:
    driven = engine()
    guided = StructuredOutputsParams(regex="[ab]{9}|[cd]{30}", backend="llguidance")
    driven.add("zero", guided, max_tokens=1)
    driven.until("zero")  # its grammar is known from now on
    for name in ("one", "two", "three"):
        driven.add(name, guided, max_tokens=20)
    scheduler = driven.core.scheduler
    while not scheduler._grammars.sequences:
        driven.step()
    first = scheduler._grammars
    driven.step()
    assert scheduler._grammars is first and len(first.rows) == 3
    driven.core.abort_requests(["two"])
    driven.step()
    assert [row[0] for row in scheduler._grammars.rows] == [0, 1]
    assert driven.until("one") and driven.until("three")
    assert "two" not in driven.ends


def test_rows_beside_free_ones_are_gathered_once(engine: Callable[..., Any]) -> None:
    tokens = []
    for free in ((), ("before", "between", "after")):
        driven = engine()
        guided = StructuredOutputsParams(regex="([ab]{2}|[cd]{3}){9}", backend="llguidance")
        for name in ("before", "one", "between", "two", "after"):
            if name in free:
                driven.add(name, max_tokens=40, ignore_eos=True)
            elif name in ("one", "two"):
                driven.add(name, guided, max_tokens=20, seed=len(name) + ord(name[0]))
        driven.until("one")
        driven.until("two")
        tokens.append([driven.tokens["one"], driven.tokens["two"]])
    assert tokens[0] == tokens[1] and all(tokens[0])


def test_rows_whose_masks_may_change_are_gathered_in_each_step(engine: Callable[..., Any]) -> None:
    driven = engine()
    guided = StructuredOutputsParams(regex="[ab]{20}", backend="llguidance")
    driven.add("few", guided, max_tokens=9, min_tokens=4, stop_token_ids=[5])
    batches = set()
    while "few" not in driven.ends:
        driven.step()
        batches.add(id(driven.core.scheduler._grammars.sequences or ()))
    assert len(driven.tokens["few"]) >= 4
    assert len(batches) > 1, "the batch is kept only once four tokens are there"


def test_the_state_of_a_known_grammar_is_ready_at_once(engine: Callable[..., Any]) -> None:
    driven = engine()
    guided = StructuredOutputsParams(regex="[ab]{3}", backend="llguidance")
    driven.add("first", guided, max_tokens=5)
    driven.until("first")
    driven.add("second", guided, max_tokens=5)
    assert driven.core._waiting_for_grammar["second"][1].done()
    driven.step()
    assert driven.tokens["second"]


def test_what_the_request_says_holds_in_a_batch() -> None:
    backend = Backend()
    ends, forbids = states(backend, Counting(3), Counting(4))
    allows = StructuredOutputState(Counting(5), batches=backend, allowed_ids=[6])  # type: ignore[arg-type]
    bitmask = torch.zeros((3, ROOM), dtype=torch.int32)
    rows: list[GrammarRow] = [(0, ends, (9,), ()), (1, forbids, (), (4,)), (2, allows, (), ())]
    GrammarBatch(rows).fill_bitmasks(bitmask, VOCAB)
    assert bitmask[:, :2].tolist() == [[1 << 3, 0], [0, 0], [0, 0]]
    assert ends.error is None, "the output is not complete, so that it may not end"
    assert forbids.error_param == "bad_words" and allows.error_param == "allowed_token_ids"


@pytest.mark.fault("structured_output", "fill_bitmasks", "accept_tokens")
@pytest.mark.parametrize("failure", ["raises", "lies"])
@pytest.mark.parametrize("method", ["fill_bitmasks", "accept_tokens"])
def test_calls_of_a_plugin_are_guarded(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, method: str, failure: str
) -> None:
    def faulty(self: Any, matchers: Any, *_: Any) -> Any:
        if failure == "raises":
            raise RuntimeError("odd")
        return ["yes"] * len(matchers)

    monkeypatch.setattr(LLGuidanceCompiler, method, faulty)
    driven = engine()
    for name in ("one", "two"):
        regex = StructuredOutputsParams(regex="[ab]{4}", backend="llguidance")
        driven.add(name, regex, max_tokens=9)
    driven.add("plain", max_tokens=5, ignore_eos=True)
    ends = [driven.until(name) for name in ("one", "two", "plain")]
    reasons = [end.finish_reason for end in ends]
    calls = driven.core.stats.plugin_calls
    assert any(method in row and "error" in row for row in map(str, calls)), calls
    if method == "fill_bitmasks":
        assert reasons == ["stop", "stop", "length"], "the matchers can do it"
    else:
        assert reasons == ["error", "error", "length"]
        words = rf"the grammar failed: structured_output:llguidance .*{method}.*"
        assert re.match(words, str(ends[0].error)), ends[0].error


def test_a_token_is_drawn_for_its_own_position(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers depend on it: in a graph and beside it they must be the same."""
    positions: list[int] = []
    sample = Sampler.sample

    def spy(
        self: Sampler, logits: Any, slots: Any, given: torch.Tensor, *more: Any, **named: Any
    ) -> Any:
        positions.extend(given.tolist())
        return sample(self, logits, slots, given, *more, **named)

    monkeypatch.setattr(Sampler, "sample", spy)
    driven = engine()
    driven.add("plain", max_tokens=4, ignore_eos=True)
    driven.until("plain")
    assert positions == [3, 4, 5, 6]
