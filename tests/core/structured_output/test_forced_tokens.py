"""Tokens that a grammar forces are computed together, and no output is another one for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from treadle import LLM, AsyncLLM, SamplingParams
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.step_types import SchedulerOutput
from treadle.structured_output import StructuredOutputState
from treadle_structured_output_kit.llguidance import LLGuidanceMatcher

POINT = {
    "type": "object",
    "properties": {
        "longitude": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a port of call", "an anchorage", "a port in a storm"]},
        "inner": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 3}, "ok": {"type": "boolean"}},
            "required": ["name", "ok"],
            "additionalProperties": False,
        },
    },
    "required": ["longitude", "kind", "inner"],
    "additionalProperties": False,
}
GUIDES = (
    StructuredOutputsParams(json=POINT, disable_any_whitespace=True, backend="llguidance"),
    StructuredOutputsParams(json=POINT, backend="llguidance"),
    StructuredOutputsParams(choice=["yes, of course", "yes, perhaps", "no"], backend="llguidance"),
    StructuredOutputsParams(regex="Name: [a-c]{2}, age: [0-9]{1,2} years", backend="llguidance"),
)
STATES = {
    "roomy": {},
    "few pages": {"num_pages": 12, "max_num_seqs": 4},
    "cut chunks": {"max_num_batched_tokens": 16, "chunked_prefill_size": 3},
    "no prefix cache": {"enable_prefix_caching": False},
    "alone": {"max_num_seqs": 1},
}
HELD: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logprobs": {"logprobs": 1},
    "processor": {"extra_args": {"repetition_window": {"ngram": 3}}},
    "allowed": {"allowed_token_ids": list(range(256))},
}
"""Requests whose tokens must all pass through the sampler."""


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the backend know of no forced tokens from now on."""
    return lambda: monkeypatch.setattr(LLGuidanceMatcher, "forced_tokens", lambda _: [])


def run(
    engine: Callable[..., Any], depth: int, requests: list[dict[str, Any]], **options: Any
) -> tuple[Any, list[SchedulerOutput]]:
    """Return a driven engine that has answered ``requests``, and its steps."""
    driven = engine(**{"max_num_seqs": 8, "logits_processors": ["repetition_window"], **options})
    driven.core.info = msgspec.structs.replace(driven.core.info, num_async_steps=depth)
    steps: list[SchedulerOutput] = []
    execute = driven.core._executor.execute_model

    def execute_model(step: SchedulerOutput) -> None:
        steps.append(step)
        execute(step)

    driven.core._executor.execute_model = execute_model
    for number, params in enumerate(requests):
        driven.add(str(number), **{"seed": number} | params)
    # All grammars are ready before the first step: which requests run together depends on no thread.
    wait([future for _, future in driven.core._waiting_for_grammar.values()], timeout=60)
    for number in range(len(requests)):
        driven.until(str(number))
    while driven.core.has_work:
        driven.step()
    stats = driven.core.stats
    assert stats.num_used_pages == 0
    assert stats.generation_tokens == sum(map(len, driven.tokens.values()))
    return driven, steps


def requests(count: int = 12, **params: Any) -> list[dict[str, Any]]:
    """Every fourth is greedy, and some end in the middle."""
    return [
        {
            "guided": GUIDES[i % len(GUIDES)],
            "temperature": 0.0 if i % 4 == 3 else 1.0 + i % 2,
            "max_tokens": 150 if i % 3 else 20 + i,
            **params,
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("state", STATES)
def test_no_token_is_another_one(
    engine: Callable[..., Any], one_by_one: Callable[[], None], depth: int, state: str
) -> None:
    wanted = [*requests(), {"guided": None, "max_tokens": 40, "ignore_eos": True}]
    jumping, jumps = run(engine, depth, wanted, **STATES[state])
    one_by_one()
    plain, steps = run(engine, depth, wanted, **STATES[state])
    assert jumping.tokens == plain.tokens and jumping.ends.keys() == plain.ends.keys()
    for name, end in plain.ends.items():
        other = jumping.ends[name]
        assert (end.finish_reason, end.stop_reason) == (other.finish_reason, other.stop_reason)
    if state == "few pages":
        assert jumping.core.stats.num_preemptions > 0
    if state == "alone":
        assert len(jumps) < 0.8 * len(steps) if depth == 0 else len(jumps) == len(steps)


@pytest.mark.parametrize("depth", [0, 1])
def test_it_ends_at_every_length(
    engine: Callable[..., Any], one_by_one: Callable[[], None], depth: int
) -> None:
    wanted = [request for length in range(1, 33) for request in requests(2, max_tokens=length)]
    jumping, _ = run(engine, depth, wanted)
    one_by_one()
    assert jumping.tokens == run(engine, depth, wanted)[0].tokens
    lengths = map(len, jumping.tokens.values())
    assert all(n <= w["max_tokens"] for n, w in zip(lengths, wanted, strict=True))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_id_in_a_forced_text_ends_it(
    engine: Callable[..., Any], one_by_one: Callable[[], None], depth: int
) -> None:
    stops = b"tg:,"
    wanted = [w for stop in stops for w in requests(4, stop_token_ids=[stop], min_tokens=4)]
    jumping, _ = run(engine, depth, wanted)
    one_by_one()
    plain, _ = run(engine, depth, wanted)
    assert jumping.tokens == plain.tokens
    assert [end.stop_reason for end in jumping.ends.values()] == [
        end.stop_reason for end in plain.ends.values()
    ]


@pytest.mark.parametrize("name", HELD)
def test_what_the_sampler_must_see_is_sampled(engine: Callable[..., Any], name: str) -> None:
    wanted = requests(2, **HELD[name])
    driven, steps = run(engine, 0, wanted)
    assert len(steps) >= max(map(len, driven.tokens.values()))


def test_words_that_are_bad_are_sampled(engine: Callable[..., Any]) -> None:
    assert not engine_sequence(engine, [[97, 98]]).may_jump
    assert engine_sequence(engine, []).may_jump


def engine_sequence(engine: Callable[..., Any], bad_words: list[list[int]]) -> Any:
    from treadle.api.requests import EngineRequest
    from treadle.scheduler.sequence import SequenceState

    request = EngineRequest("a", [1], SamplingParams(), 0.0, bad_words=bad_words)
    return SequenceState(request, engine().core.info, b"", 0)


@pytest.mark.parametrize("kind", ["final", "delta"])
def test_texts_end_at_their_stop_strings(
    llm: LLM, one_by_one: Callable[[], None], kind: str
) -> None:
    def texts() -> list[Any]:
        params = [
            SamplingParams(
                temperature=1.5,
                seed=i,
                n=2,
                max_tokens=150,
                structured_outputs=GUIDES[i % 2],
                stop=[("gitu", "rt", '"inner', "}", "perhaps")[i % 5]],
                include_stop_str_in_output=i % 2 == 0,
                output_kind=kind,
            )
            for i in range(10)
        ]
        return [
            [(o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]
            for output in llm.generate(["Hello"] * len(params), params, use_tqdm=False)
        ]

    jumping = texts()
    one_by_one()
    assert jumping == texts()


async def test_a_stream_in_another_process_has_the_same_tokens(folder: Path) -> None:
    """With log probabilities each token is sampled by itself."""
    options: dict[str, Any] = {"cpu_threads": 1, "num_pages": 64, "max_num_seqs": 4}
    async with AsyncLLM(model=str(folder), **options) as engine:
        counts = []
        for logprobs in (None, 0):
            params = SamplingParams(
                seed=1,
                n=2,
                logprobs=logprobs,
                max_tokens=150,
                structured_outputs=GUIDES[0],
                output_kind="delta",
            )
            ids: dict[int, list[int]] = {0: [], 1: []}
            text, pieces = {0: "", 1: ""}, 0
            async for output in engine.generate("Hello", params):
                for part in output.outputs:
                    ids[part.index] += part.token_ids
                    text[part.index] += part.text
                    pieces += 1
            counts.append((ids, text, (await engine.stats()).generation_tokens, pieces))
    (ids, text, total, pieces), (sampled_ids, sampled_text, both, _) = counts
    assert (ids, text) == (sampled_ids, sampled_text)
    assert total == sum(map(len, ids.values())) == both - total
    assert pieces < total


class Forcing:
    """Forces the bytes of a text, and then ends; ``fails`` is what its ``forced_tokens`` does."""

    def __init__(self, text: bytes, fails: Any = None) -> None:
        self.text, self.fails, self.length = text, fails, 0

    def fill_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        bitmask[row] = 0
        for token in self.text[self.length : self.length + 1]:
            bitmask[row, token // 32] = 1 << token % 32

    def accept_token(self, token: int) -> bool:
        is_right = not self.is_terminated and token == self.text[self.length]
        self.length += is_right
        return is_right

    def rollback(self, count: int) -> None:
        self.length -= count

    def forced_tokens(self) -> Any:
        if isinstance(self.fails, Exception):
            raise self.fails
        return list(self.text[self.length :]) if self.fails is None else self.fails

    @property
    def is_terminated(self) -> bool:
        return self.length == len(self.text)

    is_accepting = is_terminated


def test_nothing_is_forced_before_the_grammar_reads_every_token() -> None:
    reasoning = StructuredOutputState(Forcing(b"abc"), lambda token: token != 9)
    opener = StructuredOutputState(Forcing(b"abc"), lambda token: token != 9, opener=7)
    assert reasoning.forced_tokens() == opener.forced_tokens() == []
    reasoning.accept_token(9)
    opener.accept_token(97)
    assert (reasoning.forced_tokens(), opener.forced_tokens()) == ([97, 98, 99], [98, 99])
    assert StructuredOutputState(Forcing(b"abc"), allowed_ids=[97]).forced_tokens() == []


@pytest.mark.fault("structured_output", "forced_tokens")
@pytest.mark.parametrize(
    ("result", "cause"), [(None, "RuntimeError: odd"), ("yes", "a list of ints was expected")]
)
def test_a_call_of_a_plugin_is_guarded(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, result: Any, cause: str
) -> None:
    def faulty(matcher: Any) -> Any:
        if result is None:
            raise RuntimeError("odd")
        return result

    monkeypatch.setattr(LLGuidanceMatcher, "forced_tokens", faulty)
    driven = engine()
    driven.add("odd", GUIDES[0], max_tokens=9)
    driven.add("plain", max_tokens=9, ignore_eos=True)
    error = str(driven.until("odd").error)
    assert "structured_output:llguidance" in error and "failed in forced_tokens" in error
    assert cause in error and driven.until("plain").finish_reason == "length"


def run_odd(engine: Callable[..., Any], fails: Any) -> Any:
    """Return an engine with a request whose matcher ``fails``, and one without a grammar."""
    driven = engine()
    ready: Future[StructuredOutputState] = Future()
    ready.set_result(StructuredOutputState(Forcing(b"abcabc", fails)))
    driven.core._structured_output.submit = lambda _: ready
    driven.add("odd", StructuredOutputsParams(regex="a"), max_tokens=9)
    driven.add("plain", max_tokens=9, ignore_eos=True)
    return driven


@pytest.mark.parametrize("ids", [[10**6], [98, -1]])
def test_ids_that_are_no_tokens_end_their_sequence_alone(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ids: list[int]
) -> None:
    """A kernel would read the embedding of a token there."""
    monkeypatch.setattr(Forcing, "accept_token", lambda *_: True)
    driven = run_odd(engine, ids)
    assert "ids that are no tokens" in str(driven.until("odd").error)
    assert driven.until("plain").finish_reason == "length"


@pytest.mark.parametrize("fails", [KeyError("odd"), [98, 99, 100]])
def test_a_matcher_that_does_not_know_its_grammar_ends_its_sequence(
    engine: Callable[..., Any], fails: Any
) -> None:
    driven = run_odd(engine, fails)
    words = "KeyError: 'odd'" if isinstance(fails, Exception) else "does not allow token 100"
    assert words in str(driven.until("odd").error)
    assert driven.until("plain").finish_reason == "length"
