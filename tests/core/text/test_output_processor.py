"""Ids to outputs: text, stop strings, deltas, log probabilities, several outputs, aborts."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import vocabularies
from hypothesis import given
from hypothesis import strategies as st
from treadle_hf_tokenizer.tokenizer import AutoTokenizer

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import TokenLogprobs
from treadle.errors import RequestError
from treadle.outputs import RequestOutput
from treadle.text.output_processor import OutputProcessor, PreparedRequest, merge_deltas
from treadle.text.stops import StopMatcher, StopStrings

TOKENIZER = AutoTokenizer(vocabularies.byte_level())
EOS = 2


class Bench:
    """One processor and the outputs of its requests."""

    def __init__(self, tokenizer: AutoTokenizer | None = TOKENIZER) -> None:
        self.processor = OutputProcessor(tokenizer, [EOS])
        self.outputs: list[RequestOutput] = []

    def add(self, id: str = "r", prompt: list[int] | None = None, **params: Any) -> None:
        sampling = SamplingParams(**params)
        ids = prompt or TOKENIZER.encode("Hello")
        sequences = [
            EngineRequest(f"{id}.{i}", ids, sampling, 0.0, index=i) for i in range(sampling.n)
        ]
        self.processor.add(
            PreparedRequest(id, "Hello", ids, sampling, 0.0, sequences), self.outputs.append
        )

    def step(
        self, tokens: list[int], reason: str | None = None, id: str = "r.0", **more: Any
    ) -> list[str]:
        return self.processor.process([TokenOutput(id, tokens, reason, **more)])

    @property
    def text(self) -> str:
        return "".join(o.outputs[0].text for o in self.outputs)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


# ------------------------------------------------------------------ kinds of output


def test_cumulative_outputs_hold_everything_and_do_not_change_later() -> None:
    bench = Bench()
    bench.add()
    ids = encode(" world, this")
    for token in ids:
        bench.step([token])
    bench.step([EOS], "stop")
    texts = [o.outputs[0].text for o in bench.outputs]
    assert texts[-1] == " world, this" and all(b.startswith(a) for a, b in pairwise(texts))
    assert [len(o.outputs[0].token_ids) for o in bench.outputs] == list(range(1, len(ids) + 2))
    assert [o.finished for o in bench.outputs] == [False] * len(ids) + [True]
    assert bench.outputs[-1].outputs[0].finish_reason == "stop"
    assert len(bench.processor) == 0


def test_deltas_concatenate_to_the_whole() -> None:
    bench = Bench()
    bench.add(output_kind="delta")
    ids = encode(" world 日本語 😀!")
    for token in ids:
        bench.step([token])
    bench.step([EOS], "stop")
    assert bench.text == " world 日本語 😀!"
    assert [t for o in bench.outputs for t in o.outputs[0].token_ids] == [*ids, EOS]


def test_final_says_one_thing() -> None:
    bench = Bench()
    bench.add(output_kind="final")
    for token in encode(" world"):
        bench.step([token])
    assert bench.outputs == []
    bench.step([5], "length")
    (output,) = bench.outputs
    assert output.outputs[0].text == " world" + TOKENIZER.id_to_token(5)
    assert (
        output.finished and output.prompt == "Hello" and output.metrics.first_token_time is not None
    )


def test_an_unfinished_character_is_let_go_at_the_end() -> None:
    bench = Bench()
    bench.add(output_kind="delta")
    parts = [TOKENIZER.backend.token_to_id(c) for c in "ðŁĺ"]
    bench.step(parts[:2])
    assert bench.text == ""
    bench.step(parts[2:], "length")
    assert bench.text == "\ufffd"


def test_the_stop_id_is_an_id_but_not_text() -> None:
    stop = encode("x")[0]
    for include, text in ((False, " world"), (True, " worldx")):
        bench = Bench()
        bench.add(stop_token_ids=[stop], include_stop_str_in_output=include)
        bench.step([*encode(" world"), stop], "stop", stop_reason=stop)
        (output,) = bench.outputs
        assert output.outputs[0].text == text
        assert output.outputs[0].token_ids[-1] == stop and output.outputs[0].stop_reason == stop
    bench = Bench()  # a grammar's end is not a stop id: its text is wanted
    bench.add()
    bench.step(encode(" world"), "stop")
    assert bench.text == " world"


def test_special_tokens_are_shown_on_request() -> None:
    for skip, text in ((True, "ab"), (False, "a<|im_start|>b")):
        bench = Bench()
        bench.add(skip_special_tokens=skip)
        bench.step([*encode("a"), 1, *encode("b")], "length")
        assert bench.text == text


def test_without_detokenizing_there_is_no_text() -> None:
    for bench, params in ((Bench(), {"detokenize": False}), (Bench(None), {})):
        bench.add(logprobs=0, **params)
        bench.step(
            [4, 5],
            "length",
            logprobs=[TokenLogprobs([4], [-1.0], 1), TokenLogprobs([5], [-2.0], 1)],
        )
        output = bench.outputs[0].outputs[0]
        assert (output.text, output.token_ids, output.cumulative_logprob) == ("", [4, 5], -3.0)
        assert output.logprobs is not None and output.logprobs[0][4].decoded_token is None


# ------------------------------------------------------------------ stop strings


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop string to end; of those that end together the longest."""
    for end in range(1, len(text) + 1):
        if matches := [s for s in stops if text[:end].endswith(s)]:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


PIECE = st.text("abc", min_size=1, max_size=4)


@given(st.lists(PIECE, max_size=12), st.lists(PIECE, min_size=1, max_size=4))
def test_stop_strings_are_found_in_any_chunking(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    output, text = "", ""
    expected_text, stop = expected("".join(pieces), stops)
    for piece in pieces:
        text += piece
        output += matcher.feed(piece)
        assert expected_text.startswith(output), "what was shown is never taken back"
        if matcher.matched is not None:
            break
        pending = text[len(output) :]
        assert pending == max(
            (s[:n] for s in stops for n in range(len(s)) if text.endswith(s[:n])),
            key=len,
            default="",
        )
    if matcher.matched is None:
        output += matcher.finish()
    assert (output, matcher.matched) == (expected_text, stop)


def test_stop_strings_take_linear_time() -> None:
    stops = StopStrings(["a" * 255 + "b", "aab" * 80 + "c"])
    text = "a" * 200_000
    start_time = time.thread_time()
    matcher = StopMatcher(stops)
    num_chars = sum(len(matcher.feed(text[i : i + 3])) for i in range(0, len(text), 3))
    assert len(matcher.finish()) == 255 and num_chars == len(text) - 255
    assert time.thread_time() - start_time < 20


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_ends_the_output_across_tokens(kind: str, include: bool) -> None:
    bench = Bench()
    bench.add(stop=["stop here", "nothing"], output_kind=kind, include_stop_str_in_output=include)
    text = " world st, stop here and more"
    aborted: list[str] = []
    for token in encode(text):
        aborted += bench.step([token])
    last = bench.outputs[-1]
    full_text = bench.text if kind == "delta" else last.outputs[0].text
    assert full_text == " world st, " + ("stop here" if include else "")
    assert aborted == ["r.0"], "the engine is told once"
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", "stop here")
    assert last.finished and len(bench.processor) == 0
    ids = (
        [t for o in bench.outputs for t in o.outputs[0].token_ids]
        if kind == "delta"
        else last.outputs[0].token_ids
    )
    assert TOKENIZER.decode(ids).rstrip().endswith("stop here"), (
        "ids end with the token that completed it"
    )


def test_no_part_of_a_stop_string_is_ever_shown() -> None:
    bench = Bench()
    bench.add(stop="END", output_kind="delta")
    for char in "abEN":
        bench.step(encode(char))
    assert bench.text == "ab"
    bench.step(encode("x"))
    assert bench.text == "abENx"
    for char in "EN":
        bench.step(encode(char))
    bench.step([EOS], "stop")
    assert bench.text == "abENxEN"


def test_tokens_of_the_same_step_behind_a_stop_string_are_dropped() -> None:
    bench = Bench()
    bench.add(stop="b", logprobs=0)
    ids = encode("a") + encode("b") + encode("c")
    logprobs = [TokenLogprobs([t], [-1.0], 1) for t in ids]
    assert bench.step(ids, "length", logprobs=logprobs) == [], "the engine has ended it itself"
    output = bench.outputs[0].outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("a", ids[:2], "stop")
    assert (
        output.logprobs is not None
        and len(output.logprobs) == 2
        and output.cumulative_logprob == -2.0
    )


def test_a_stop_string_counts_from_the_token_behind_min_tokens_on() -> None:
    bench = Bench()
    bench.add(stop="c", min_tokens=2)
    bench.step([encode("a")[0], encode("c")[0], encode("b")[0], encode("c")[0]])
    (output,) = bench.outputs[-1].outputs
    assert (output.text, output.stop_reason) == ("acb", "c")


def test_min_tokens_delays_stop_strings() -> None:
    bench = Bench()
    bench.add(stop="a", min_tokens=3, output_kind="delta")
    for char in "aab":
        assert bench.step(encode(char)) == []
    assert bench.step(encode("a")) == ["r.0"]
    assert bench.text == "aab"


# ------------------------------------------------------------------ log probabilities


def test_logprobs_name_tokens_and_finish_characters() -> None:
    bench = Bench()
    bench.add(logprobs=2)
    first, second = (TOKENIZER.backend.token_to_id(c) for c in "Ã©")  # the two bytes of é
    a, world = encode("a")[0], encode(" world")[0]
    bench.step([first], logprobs=[TokenLogprobs([first, a, first], [-0.5, -0.1, -0.5], 2)])
    bench.step([second], logprobs=[TokenLogprobs([second, second, world], [-0.2, -0.2, -3.0], 1)])
    output = bench.outputs[-1].outputs[0]
    assert output.logprobs is not None
    first_entry, second_entry = output.logprobs
    assert {t: (e.rank, e.decoded_token) for t, e in first_entry.items()} == {
        first: (2, ""),
        a: (1, "a"),
    }
    assert next(iter(first_entry)) == first, "the chosen one comes first"
    assert second_entry[second].decoded_token == "é"
    assert second_entry[world].decoded_token == "\ufffd world", (
        "an alternative would have broken the character"
    )
    assert output.cumulative_logprob == pytest.approx(-0.7)


def test_deltas_hold_new_logprobs_only() -> None:
    bench = Bench()
    bench.add(logprobs=0, output_kind="delta")
    for token in encode(" world"):
        bench.step([token], logprobs=[TokenLogprobs([token], [-1.0], 1)])
    assert all(
        len(o.outputs[0].logprobs or []) == len(o.outputs[0].token_ids) for o in bench.outputs
    )


def test_prompt_logprobs_come_once_and_with_the_first() -> None:
    ids = TOKENIZER.encode("Hello é")
    for kind in ("delta", "cumulative"):
        bench = Bench()
        bench.add(prompt=ids, prompt_logprobs=0, output_kind=kind)
        entries = [TokenLogprobs([t], [-1.0], 1) for t in ids[1:]]
        bench.step(encode("x"), prompt_logprobs=entries)
        bench.step(encode("y"), "length")
        first, last = bench.outputs[0].prompt_logprobs, bench.outputs[-1].prompt_logprobs
        assert first is not None and first[0] is None and len(first) == len(ids)
        texts = [next(iter(p.values())).decoded_token for p in first[1:] if p]
        assert TOKENIZER.id_to_token(ids[0]) + "".join(map(str, texts)) == "Hello é"
        assert (last is None) == (kind == "delta")


# ------------------------------------------------------------------ several outputs, ends


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_several_outputs_of_one_request(kind: str) -> None:
    bench = Bench()
    bench.add(n=3, output_kind=kind, stop="!")
    outs = [TokenOutput(f"r.{i}", encode("abc"[i])) for i in range(3)]
    assert bench.processor.process(outs) == []
    assert len(bench.outputs) == (0 if kind == "final" else 1), "one output for one step"
    bench.step([EOS], "stop", id="r.1")
    assert bench.step(encode("!"), id="r.2") == ["r.2"]
    assert len(bench.processor) == 1
    bench.step([EOS], "stop", id="r.0")
    last = bench.outputs[-1]
    assert last.finished and len(bench.processor) == 0
    if kind == "delta":
        assert [o.index for o in last.outputs] == [0]
        texts = {
            i: "".join(o.text for r in bench.outputs for o in r.outputs if o.index == i)
            for i in range(3)
        }
    else:
        texts = {o.index: o.text for o in last.outputs}
    assert texts == {0: "a", 1: "b", 2: "c"}


def test_an_abort_is_answered_with_what_there_is() -> None:
    bench = Bench()
    bench.add(n=2, stop="abc")
    bench.processor.process([TokenOutput("r.0", encode("xab")), TokenOutput("r.1", [EOS], "stop")])
    assert bench.processor.abort("r") == ["r.0"]
    last = bench.outputs[-1]
    assert last.finished and [o.finish_reason for o in last.outputs] == ["abort", "stop"]
    assert last.outputs[0].text == "xab", "held back text is let go"
    assert bench.processor.abort("r") == [] and bench.processor.drop("r") == []
    count = len(bench.outputs)
    bench.step(encode("late"))
    assert len(bench.outputs) == count


def test_an_engine_error_is_the_outputs_error() -> None:
    bench = Bench()
    bench.add()
    bench.step([], "error", error="the grammar broke")
    (output,) = bench.outputs
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == (
        "error",
        "the grammar broke",
    )


def test_a_failing_tokenizer_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.add("bad", output_kind="cumulative")
    bench.add("good")
    _, bad = bench.processor._sequences["bad.0"]
    bad._stream, bad._decode_many = object(), None  # type: ignore[assignment]
    aborts = bench.processor.process(
        [TokenOutput("bad.0", [4]), TokenOutput("good.0", encode("a"), "length")]
    )
    assert aborts == ["bad.0"]
    by_id = {o.request_id: o.outputs[0] for o in bench.outputs}
    assert by_id["bad"].finish_reason == "error" and "object" not in str(by_id["bad"].error)
    assert by_id["good"].text == "a"


class OneByOne(AutoTokenizer):
    """A tokenizer whose detokenizers have only what all have."""

    def create_detokenizer(self, *args: Any, **options: Any) -> Any:
        stream = super().create_detokenizer(*args, **options)
        return SimpleNamespace(decode_next=stream.decode_next, flush=stream.flush)


@pytest.mark.parametrize("kind", [AutoTokenizer, OneByOne])
@pytest.mark.parametrize("last", ["length", "stop", "abort"])
def test_a_text_that_is_seen_at_its_end_is_that_of_one_seen_as_it_grows(
    last: str, kind: type[AutoTokenizer]
) -> None:
    rng, bench = random.Random(3), Bench(kind(vocabularies.byte_level()))
    bench.add("late", output_kind="final")
    bench.add("early", output_kind="cumulative")
    tokens = [rng.randrange(TOKENIZER.vocab_size) for _ in range(100)]
    tokens += encode("世")[:1] if last != "stop" else [EOS]  # an unfinished character
    for token in tokens[:-1]:
        both = [TokenOutput(f"{name}.0", [token]) for name in ("late", "early")]
        assert bench.processor.process(both) == []
    assert {output.request_id for output in bench.outputs} == {"early"}
    if last == "abort":
        for name in ("late", "early"):
            bench.processor.process([TokenOutput(f"{name}.0", tokens[-1:])])
            bench.processor.abort(name)
    else:
        bench.processor.process(
            [TokenOutput(f"{name}.0", tokens[-1:], last) for name in ("late", "early")]
        )
    ends = {output.request_id: output.outputs[0] for output in bench.outputs if output.finished}
    assert ends["late"] == ends["early"] and ends["late"].text
    assert ends["late"].token_ids == tokens and ends["late"].finish_reason == last


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add()
    with pytest.raises(RequestError, match="'r'") as exc_info:
        bench.add()
    assert exc_info.value.param == "request_id"


def test_merged_deltas_are_one_delta() -> None:
    rng = random.Random(1)
    direct, slow = Bench(), Bench()
    for bench in (direct, slow):
        bench.add(n=2, output_kind="delta", logprobs=0, prompt_logprobs=0)
    for step in range(20):
        outs = [
            TokenOutput(
                f"r.{i}",
                [t := rng.randrange(3, TOKENIZER.vocab_size)],
                "length" if step == 19 else None,
                logprobs=[TokenLogprobs([t], [-1.0], 1)],
                prompt_logprobs=[TokenLogprobs([4], [-1.0], 1)] if step == 0 else None,
            )
            for i in range(2)
            if step % 3 or i
        ]
        direct.processor.process(outs)
        slow.processor.process(outs)
    merged = slow.outputs[0]
    for delta in slow.outputs[1:]:
        merged = merge_deltas(merged, delta)
    for index in range(2):
        parts = [o for r in direct.outputs for o in r.outputs if o.index == index]
        (mine,) = (o for o in merged.outputs if o.index == index)
        assert mine.text == "".join(o.text for o in parts)
        assert mine.token_ids == [t for o in parts for t in o.token_ids]
        assert mine.logprobs == [p for o in parts for p in o.logprobs or []]
        assert mine.finish_reason == "length" or index == 0
    assert merged.finished == direct.outputs[-1].finished and merged.prompt_logprobs is not None


@pytest.mark.parametrize(
    "params", [{}, {"output_kind": "delta"}, {"output_kind": "delta", "stop": ["\n\nUser:", "###"]}]
)
def test_the_cost_of_a_token_is_small(params: dict[str, Any]) -> None:
    """Microseconds; the bound is loose because machines are shared."""
    bench = Bench()
    rng = random.Random(0)
    for i in range(64):
        bench.add(f"q{i}", **params)
    steps = [
        [TokenOutput(f"q{i}.0", [rng.randrange(3, 400)]) for i in range(64)] for _ in range(50)
    ]
    best = 1.0
    for step in steps:
        start_time = time.perf_counter()
        bench.processor.process(step)
        best = min(best, (time.perf_counter() - start_time) / 64)
    assert best < 60e-6, f"{best * 1e6:.1f} us"
