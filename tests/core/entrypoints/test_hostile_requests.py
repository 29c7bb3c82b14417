"""A request whose values cannot cross a process boundary fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.engine.ipc import encode_request, request_id
from treadle.entrypoints.async_llm import AsyncLLM
from treadle.entrypoints.llm import LLM
from treadle.errors import RequestError, TreadleError
from treadle.text.request_checks import check_json

HUGE = 10**20
DEEP: Any = 1
for _ in range(2_000):
    DEEP = {"a": DEEP}

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.integers(2**63, 2**80) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=False, **fields)


async def outcome(engine: AsyncLLM, prompt: Any, sampling_params: SamplingParams) -> Any:
    """Return the token ids, or the error that the caller sees."""
    tokens: Any = None
    try:
        async for output in engine.generate(prompt, sampling_params):
            tokens = output.outputs[0].error or output.outputs[0].token_ids
    except TreadleError as error:
        return error
    return tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(checkpoint: Callable[..., Path]) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(checkpoint(tokenizer=True)), cpu_threads=1, num_pages=64) as engine:
        yield engine


async def with_innocents(engine: AsyncLLM, hostile: SamplingParams, prompt: Any = "a") -> Any:
    """Run ``hostile`` among innocent requests of the same flush, and return what became of it."""
    expected = await outcome(engine, [5, 6, 7], params())
    assert len(expected) == 2
    runs = [outcome(engine, [5, 6, 7], params()) for _ in range(3)]
    runs.insert(1, outcome(engine, prompt, hostile))
    async with asyncio.timeout(60):
        results = await asyncio.gather(*runs)
    assert [results[0], *results[2:]] == [expected] * 3
    return results[1]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": HUGE},
        {"const": "\ud800"},
        {"enum": [float("nan")]},
        {"a": object()},
        DEEP,
    ],
    ids=["huge", "surrogate", "nan", "object", "deep"],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_schema_that_cannot_be_sent(engine: AsyncLLM, schema: Any) -> None:
    constraint = StructuredOutputsParams(json=schema)
    result = await with_innocents(engine, params(structured_outputs=constraint))
    assert isinstance(result, RequestError) and result.param in (
        "structured_outputs",
        "guided_json",
    )


@pytest.mark.parametrize(
    "value", [HUGE, -HUGE, float("inf"), "\udfff", {1: 2}, b"x", DEEP, object()]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_arguments_that_cannot_be_sent(engine: AsyncLLM, value: Any) -> None:
    result = await with_innocents(engine, params(extra_args={"window": {"size": value}}))
    assert isinstance(result, RequestError) and result.param == "extra_args"


@pytest.mark.parametrize(
    "field", ["regex", "grammar", "whitespace_pattern", "backend", "reasoning"]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_text_that_cannot_be_sent(engine: AsyncLLM, field: str) -> None:
    form = {"json_object": True} if field not in ("regex", "grammar") else {}
    constraint = StructuredOutputsParams(**{**form, field: "a\ud800"})
    result = await with_innocents(engine, params(structured_outputs=constraint))
    assert isinstance(result, RequestError)


@settings(suppress_health_check=list(HealthCheck), database=None)
@given(
    st.sampled_from(["json", "regex", "grammar", "choice", "extra_args", "stop", "prompt"]), JSON
)
@pytest.mark.asyncio(loop_scope="module")
async def test_any_value_of_any_field(engine: AsyncLLM, field: str, value: Any) -> None:
    """Whatever a field holds, the innocent requests of the same flush are served."""
    prompt: Any = "a"
    fields: dict[str, Any] = {}
    if field in ("json", "regex", "grammar", "choice"):
        fields["structured_outputs"] = StructuredOutputsParams(**{field: value})
    elif field == "prompt":
        prompt = value
    else:
        fields[field] = value
    try:
        hostile = params(**fields)
    except (RequestError, TypeError):
        hostile = params()
    await with_innocents(engine, hostile, prompt)


HOSTILE_CHATS: dict[str, dict[str, Any]] = {
    "argument": {"chat_template_kwargs": {"size": HUGE}},
    "document": {"chat_template_kwargs": {"documents": [{"text": "\ud800"}]}},
    "deep_argument": {"chat_template_kwargs": {"tree": DEEP}},
    "tool": {"tools": [{"type": "function", "function": {"name": "f", "description": "\udfff"}}]},
    "deep_tool": {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
    "huge_tool": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": HUGE}}}]
    },
    "message": {"messages": [{"role": "user", "content": "a\ud800"}]},
    "field": {"messages": [{"role": "user", "content": "a", "weight": HUGE}]},
    "deep_message": {"messages": [{"role": "user", "content": [DEEP]}]},
}


@pytest.mark.parametrize("options", HOSTILE_CHATS.values(), ids=HOSTILE_CHATS.keys())
@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_that_cannot_be_sent(engine: AsyncLLM, options: dict[str, Any]) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(RequestError) as caught:
        async for _ in engine.chat(**chat | options, sampling_params=params()):
            pass
    assert str(caught.value.param).startswith(next(iter(options)))
    async for output in engine.chat(**chat, sampling_params=params()):
        assert output.outputs[0].error is None


def test_a_chat_that_cannot_be_sent_is_refused_in_process_too(
    checkpoint: Callable[..., Path],
) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    with LLM(str(checkpoint(tokenizer=True)), cpu_threads=1, num_pages=64) as llm:
        for options in HOSTILE_CHATS.values():
            with pytest.raises(RequestError) as caught:
                llm.chat(**chat | options, sampling_params=params(), use_tqdm=False)
            assert str(caught.value.param).startswith(next(iter(options)))


def test_json_is_bounded() -> None:
    check_json("x", {"a": [1, -(2**63), 2**64 - 1, 1.5, None, True, "ü", {"b": {}}]})
    for value in (2**64, -(2**63) - 1, float("nan"), {1: 1}, (object(),), "\ud800", {"\ud800": 1}):
        with pytest.raises(RequestError) as exc_info:
            check_json("x", [value])
        assert exc_info.value.param == "x"
    with pytest.raises(RequestError, match="100000"):
        check_json("x", [0] * 100_001)


def test_an_encoded_request_keeps_its_id() -> None:
    request = EngineRequest("7", [1], SamplingParams(), 0.0)
    assert request_id(encode_request(request)) == "7"
    with pytest.raises(RequestError, match="cannot be sent"):
        encode_request(msgspec.structs.replace(request, prompt_ids=[HUGE]))
