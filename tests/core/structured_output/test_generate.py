"""Structured output from end to end: random weights at temperature 2, and every stop is valid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from treadle import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from treadle.errors import RequestError

BACKENDS = ("llguidance", "outlines", "lm-format-enforcer")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
        "boss": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/boss"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {
        "boss": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}
GRAMMAR = 'root ::= item ("," item)*\nitem ::= [a-c] | "(" root ")"'


def hot(guided: StructuredOutputsParams, seed: int = 0, **params: Any) -> SamplingParams:
    return SamplingParams(**{
        "temperature": 2.0, "max_tokens": 150, "seed": seed, "structured_outputs": guided, **params
    })  # fmt: skip


def texts(llm: LLM, params: list[SamplingParams]) -> list[str]:
    """What came to its end. Nothing may fail, and something must end."""
    outputs = [o.outputs[0] for o in llm.generate(["Hello"] * len(params), params, use_tqdm=False)]
    assert {o.finish_reason for o in outputs} <= {"stop", "length"}, [o.error for o in outputs]
    ended = [o.text for o in outputs if o.finish_reason == "stop"]
    assert ended
    return ended


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_stopped_completion_validates(llm: LLM, backend: str) -> None:
    guided = StructuredOutputsParams(json=PERSON, backend=backend)
    for text in texts(llm, [hot(guided, seed) for seed in range(24)]):
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("backend", BACKENDS)
def test_regex_choice_and_object(llm: LLM, backend: str) -> None:
    regex = StructuredOutputsParams(regex=r"^\d{3}-[a-f]+$", backend=backend)
    for text in texts(llm, [hot(regex, seed) for seed in range(8)]):
        assert re.fullmatch(r"[0-9]{3}-[a-f]+", text)
    choice = StructuredOutputsParams(choice=["yes", "no", "perhaps é"], backend=backend)
    assert set(texts(llm, [hot(choice, seed) for seed in range(16)])) <= {"yes", "no", "perhaps é"}
    anything = StructuredOutputsParams(json_object=True, backend=backend)
    for text in texts(llm, [hot(anything, seed) for seed in range(12)]):
        assert isinstance(json.loads(text), dict)


def test_look_around_leads_to_no_dead_end(llm: LLM) -> None:
    guided = StructuredOutputsParams(regex="(?!ab)[ab]{2}", backend="lm-format-enforcer")
    assert set(texts(llm, [hot(guided, seed) for seed in range(16)])) <= {"aa", "ba", "bb"}


LATER = StructuredOutputsParams(grammar='start: "a" x\nx: x "b"')


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_a_dead_end_costs_its_own_output(llm: LLM, backend: str) -> None:
    import msgspec

    dead = msgspec.structs.replace(LATER, backend=backend)
    outputs = llm.generate(["x", "y"], [hot(dead), SamplingParams(max_tokens=30)], use_tqdm=False)
    first, second = (output.outputs[0] for output in outputs)
    assert first.text == "a" and first.finish_reason == "error" and "dead end" in str(first.error)
    assert first.error_param == "structured_outputs" and second.finish_reason in ("stop", "length")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limits", [{"allowed_token_ids": [5]}, {"bad_words": ["b"]}])
def test_what_no_token_begins_never_runs(llm: LLM, backend: str, limits: dict[str, Any]) -> None:
    tokens = llm.stats.prompt_tokens
    with pytest.raises(RequestError, match="the grammar allows no token here") as error:
        llm.generate("x", hot(StructuredOutputsParams(regex="b+", backend=backend), **limits))
    assert error.value.param == next(iter(limits))
    assert llm.stats.prompt_tokens == tokens


@pytest.mark.parametrize(
    ("limits", "param", "message"),
    [
        ({"ignore_eos": True}, "structured_outputs", "dead end"),
        ({"min_tokens": 2}, "min_tokens", "allows no token"),
    ],
)
def test_an_empty_output_that_may_not_end(
    llm: LLM, limits: dict[str, Any], param: str, message: str
) -> None:
    guided = StructuredOutputsParams(regex="(a{0})")
    assert llm.generate("x", hot(guided), use_tqdm=False)[0].outputs[0].text == ""
    with pytest.raises(RequestError, match=message) as error:
        llm.generate("x", hot(guided, **limits), use_tqdm=False)
    assert error.value.param == param


@pytest.mark.parametrize("backend", ["llguidance", "outlines", None])
def test_grammars(llm: LLM, backend: str | None) -> None:
    guided = StructuredOutputsParams(grammar=GRAMMAR, backend=backend)
    for text in texts(llm, [hot(guided, seed) for seed in range(12)]):
        while (inner := re.sub(r"\([abc](,[abc])*\)", "a", text)) != text:
            text = inner
        assert re.fullmatch(r"[abc](,[abc])*", text)
    with pytest.raises(RequestError, match="lm-format-enforcer: grammars of the kind ebnf"):
        llm.generate(
            "x",
            hot(StructuredOutputsParams(grammar=GRAMMAR, backend="lm-format-enforcer")),
            use_tqdm=False,
        )


def test_all_backends_in_one_batch_beside_free_ones(llm: LLM) -> None:
    params = [
        hot(StructuredOutputsParams(json=PERSON, backend=name), seed=s)
        for s in range(4)
        for name in BACKENDS
    ]
    params += [SamplingParams(temperature=2.0, max_tokens=20, seed=9, ignore_eos=True)] * 2
    expected = [
        llm.generate("Hello", p, use_tqdm=False)[0].outputs[0].token_ids for p in params[:4]
    ]
    outputs = llm.generate(["Hello"] * len(params), params, use_tqdm=False)
    completions = [o.outputs[0] for o in outputs]
    assert [o.token_ids for o in completions[:4]] == expected, (
        "the batch changes what a row samples"
    )
    assert (
        completions[-1].token_ids == completions[-2].token_ids
        and len(completions[-1].token_ids) == 20
    )
    assert any(o.finish_reason == "stop" for o in completions[:12])
    for output in completions[:12]:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), PERSON)


def test_several_outputs_of_one_prompt(llm: LLM) -> None:
    params = hot(StructuredOutputsParams(json=PERSON), n=6)
    prompt = "a prompt that is longer than a page " * 3
    for _ in range(2):  # the second time the prompt is cached
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        assert len({o.text for o in output.outputs}) > 1
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                jsonschema.validate(json.loads(completion.text), PERSON)
    assert output.num_cached_tokens > 0


def test_preemption_changes_nothing(folder: Path, llm: LLM) -> None:
    params = [hot(StructuredOutputsParams(json=PERSON), seed, max_tokens=100) for seed in range(8)]
    prompts = [[i + 1] * 20 for i in range(8)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(model=str(folder), cpu_threads=1, num_pages=14, max_num_seqs=8) as small:
        outputs = small.generate(prompts, params, use_tqdm=False)
        assert small.stats.num_preemptions > 0
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_the_length_cuts(llm: LLM) -> None:
    output = llm.generate(
        "x", hot(StructuredOutputsParams(regex="a{50}"), max_tokens=7), use_tqdm=False
    )
    assert output[0].outputs[0].text == "a" * 7
    assert output[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("regex", "least"), [("a{3}", 3), ("a+", 10), ("a{3}|a{12}", 3), ("a{3}b?", 3)]
)
def test_min_tokens_never_fails_a_complete_output(
    llm: LLM, backend: str, regex: str, least: int
) -> None:
    guided = StructuredOutputsParams(regex=regex, backend=backend)
    params = [hot(guided, seed, min_tokens=10, max_tokens=40) for seed in range(6)]
    for text in texts(llm, params):
        assert re.fullmatch(regex, text) and len(text) >= least


def test_any_of_the_models_stop_ids_ends_it(tmp_path: Path) -> None:
    """The tokenizer knows one end, the model three, and the request one more."""
    from treadle.testing.checkpoints import make_checkpoint

    folder = make_checkpoint(tmp_path, tokenizer=True, eos_token_id=[257, 300, 301])
    with LLM(model=str(folder), cpu_threads=1, num_pages=128) as llm:
        guided = StructuredOutputsParams(regex="[ab]{1,60}")
        params = [hot(guided, seed, stop_token_ids=[302]) for seed in range(32)]
        outputs = [o.outputs[0] for o in llm.generate(["x"] * 32, params, use_tqdm=False)]
        last = {o.token_ids[-1] for o in outputs if o.finish_reason == "stop"}
        assert len(last & {257, 300, 301, 302}) >= 2
        assert all(re.fullmatch("[ab]{1,60}", o.text) for o in outputs)
        params = [hot(guided, seed, ignore_eos=True) for seed in range(4)]
        outputs = [o.outputs[0] for o in llm.generate(["x"] * 4, params, use_tqdm=False)]
        assert {len(o.text) for o in outputs} == {60}, "the end of the grammar ends it"


WRONG: list[tuple[StructuredOutputsParams, str]] = [
    (StructuredOutputsParams(regex="("), "cannot compile the grammar"),
    (StructuredOutputsParams(json={"type": "foo"}), "cannot compile|would be ignored|type is"),
    (StructuredOutputsParams(json={"type": "array", "contains": {"pattern": "a"}}), "contains.*contains.*contains"),
    (StructuredOutputsParams(json="{"), "is not JSON"),
    *(
        (StructuredOutputsParams(json={"$ref": ref}, backend=name), "cannot be followed|cannot compile|failed|dead end")
        for name in BACKENDS
        for ref in ("#", "http://localhost/schema.json", "file:///etc/passwd")
    ),
    (StructuredOutputsParams(regex="a", whitespace_pattern=" "), "belongs to json"),
    (StructuredOutputsParams(json={"const": object()}), "written as JSON"),
    (StructuredOutputsParams(json="[]"), "it must be a JSON object"),
    (StructuredOutputsParams(json="[" * 5000 + "]" * 5000), "not JSON|it must be a JSON object"),
    (StructuredOutputsParams(json={"enum": ["x" * 70000]}), "at most 65536"),
    (StructuredOutputsParams(regex="a" * 9000), "at most 8192"),
    (StructuredOutputsParams(regex="(" * 65 + ")" * 65), "nested 65 deep"),
    (StructuredOutputsParams(regex=""), "empty"),
    (StructuredOutputsParams(choice=[]), "non-empty"),
    (StructuredOutputsParams(choice=["a"] * 1025), "1024"),
    (StructuredOutputsParams(grammar="root ::= ("), "cannot compile|cannot enforce"),
    (StructuredOutputsParams(regex="a", choice=["b"]), "exactly one"),
    (StructuredOutputsParams(), "exactly one"),
    (StructuredOutputsParams(regex="a", backend="nope"), "installed are"),
]  # fmt: skip


@pytest.mark.parametrize(("guided", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_raises(llm: LLM, guided: StructuredOutputsParams, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        llm.generate(["x", "y"], [SamplingParams(max_tokens=30), hot(guided)], use_tqdm=False)
    assert error.value.param
    with pytest.raises(RequestError, match=message):
        list(llm.stream("x", hot(guided)))
    assert llm.generate("x", use_tqdm=False)[0].finished


async def test_a_dead_end_in_a_process_of_its_own(folder: Path) -> None:
    async with AsyncLLM(str(folder), cpu_threads=1, num_pages=64) as engine:
        async for output in engine.generate("x", hot(LATER)):
            last = output.outputs[0]
        assert (last.finish_reason, last.error_param) == ("error", "structured_outputs")
        impossible = hot(StructuredOutputsParams(regex="b"), allowed_token_ids=[5])
        with pytest.raises(RequestError, match="allows no token") as error:
            async for _ in engine.generate("x", impossible):
                raise AssertionError("an output before the refusal")
        assert error.value.param == "allowed_token_ids"


async def test_streams_in_a_process_of_their_own(folder: Path) -> None:
    async with AsyncLLM(str(folder), cpu_threads=1, num_pages=64) as engine:
        good = hot(StructuredOutputsParams(json=PERSON), output_kind="delta", seed=3)
        text = ""
        async for output in engine.generate("x", good):
            text += output.outputs[0].text
        if output.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(text), PERSON)
        for guided in (
            StructuredOutputsParams(regex="("),
            StructuredOutputsParams(choice=["a"], backend="none"),
        ):
            with pytest.raises(RequestError) as error:
                async for _ in engine.generate("x", hot(guided, n=2)):
                    raise AssertionError("an output before the refusal")
            assert error.value.param
        assert engine.unfinished == 0
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_strict_may_be_relaxed(folder: Path) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2}
    for name in BACKENDS:
        options = {f"structured_output:{name}": {"strict": False}}
        with LLM(model=str(folder), cpu_threads=1, num_pages=64, plugin_options=options) as loose:
            outputs = texts(
                loose,
                [hot(StructuredOutputsParams(json=schema, backend=name), s) for s in range(8)],
            )
            assert all(isinstance(json.loads(text), list) for text in outputs)


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path, engine: Callable[..., Any]) -> None:
    from treadle.testing.checkpoints import make_checkpoint

    with LLM(model=str(make_checkpoint(tmp_path)), cpu_threads=1, num_pages=64) as bare:
        params = hot(StructuredOutputsParams(regex="a"), detokenize=False)
        with pytest.raises(RequestError, match="tokenizer"):
            bare.generate([[1, 2]], params, use_tqdm=False)
