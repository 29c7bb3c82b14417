from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import events, serving

from treadle_server.completions.fill_in import FORMATS


async def test_a_completion() -> None:
    async with serving() as server:
        answer = (await server.complete(model="scripted", max_tokens=3)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "Hello wor", "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 9,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("ab", 1), ([97, 98], 1), (["ab", "c"], 2), ([[97], [98], [99]], 3)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_form_of_prompt(prompt: Any, count: int, stream: bool) -> None:
    async with serving() as server:
        response = await server.complete(prompt=prompt, n=2, echo=True, stream=stream)
    assert response.status_code == 200, response.text
    texts = dict.fromkeys(range(count * 2), "")
    parts = events(response.text)[:-1] if stream else [response.json()]
    for part in parts:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    firsts = [p if isinstance(p, str) else "".join(map(chr, p)) for p in listed(prompt)]
    assert texts == {i: firsts[i // 2] + "Hello world" for i in range(count * 2)}


def listed(prompt: Any) -> list[Any]:
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": ["a"] * 129, "n": 2}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 129}, "n"),
    ({"suffix": "x"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 10**18}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"cache_salt": "a\nb"}, "cache_salt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
]


async def test_a_wrong_field_is_named() -> None:
    errors: list[tuple[dict[str, Any], Any]] = []
    async with serving() as server:
        for fields, _ in WRONG:
            response = await server.complete(**fields)
            error = response.json()["error"]
            assert response.status_code == 400, (fields, error)
            assert error["message"] and error["type"] == "invalid_request_error"
            errors.append((fields, error["param"]))
        assert (await server.complete()).status_code == 200
    assert errors == WRONG


async def test_parameters_reach_the_engine() -> None:
    engine = ScriptedEngine()
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "seed": 3,
        "min_tokens": 1,
        "max_tokens": 9,
        "stop": ["x"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "prompt_logprobs": 1,
        "logprobs": 2,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 4,
        "priority": 2,
        "cache_salt": "s",
        "n": 2,
    }
    async with serving(engine) as server:
        response = await server.complete(
            **fields, logit_bias={"7": -3}, guided_regex="a+", best_of=2
        )
        assert response.status_code == 200, response.text
        params = engine.params
        assert params is not None
        assert {name: getattr(params, name) for name in fields} == fields
        assert params.logit_bias == {7: -3.0}
        assert params.structured_outputs is not None and params.structured_outputs.regex == "a+"
        assert params.output_kind == "final"
        await server.complete(stream=True)
        assert engine.params is not None and engine.params.output_kind == "delta"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(stream: bool) -> None:
    async with serving(ScriptedEngine(["c"])) as server:
        response = await server.complete(echo=True, logprobs=1, stream=stream)
    parts = events(response.text)[:-1] if stream else [response.json()]
    merged: dict[str, list[Any]] = {}
    for part in parts:
        for key, values in part["choices"][0]["logprobs"].items():
            merged.setdefault(key, []).extend(values)
    assert merged["tokens"] == ["a", "b", "c"]
    assert merged["text_offset"] == [0, 1, 2]
    assert merged["token_logprobs"] == [None, -0.5, -0.5]
    assert merged["top_logprobs"] == [None, {"b": -0.5}, {"c": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_zero_scores_only(stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    async with serving() as server:
        response = await server.complete(
            echo=True, max_tokens=0, logprobs=0, stream=stream, **options
        )
    parts = events(response.text)[:-1] if stream else [response.json()]
    assert "".join(c["text"] for p in parts for c in p["choices"]) == "ab"
    reasons = [c["finish_reason"] for p in parts for c in p["choices"] if c["finish_reason"]]
    assert reasons == ["length"]
    assert parts[-1]["usage"]["completion_tokens"] == 0
    assert parts[-1]["usage"]["total_tokens"] == 2


async def test_logprobs_are_finite_numbers() -> None:
    async with serving(ScriptedEngine(["c"])) as server:
        answer = (await server.complete(logprobs=2, prompt_logprobs=2)).json()["choices"][0]
    assert answer["logprobs"]["top_logprobs"] == [{"c": -0.5, "d": -9999.0}]
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["99"]["logprob"] == -9999.0


async def test_a_stream_is_chunks_usage_and_done() -> None:
    async with serving() as server:
        response = await server.complete(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 11
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello world"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert len({c["id"] for c in chunks}) == 1


async def test_token_ids_come_when_asked() -> None:
    async with serving(ScriptedEngine(["c", "d"])) as server:
        choice = (await server.complete(return_token_ids=True)).json()["choices"][0]
        streamed = events((await server.complete(return_token_ids=True, stream=True)).text)[:-1]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [99, 100])
    assert streamed[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    assert [i for c in streamed for i in c["choices"][0].get("token_ids", [])] == [99, 100]


async def test_any_served_name_answers_with_the_first() -> None:
    async with serving(ScriptedEngine(names=["first", "second"])) as server:
        for name in ("first", "second", None, ""):
            assert (await server.complete(model=name)).json()["model"] == "first"
        response = await server.complete(model="third")
        models = (await server.client.get("/v1/models")).json()["data"]
        second_model = await server.client.get("/v1/models/second")
        unknown_model = await server.client.get("/v1/models/org/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert [m["id"] for m in models] == ["first", "second"]
    assert second_model.json()["max_model_len"] == 1000
    assert unknown_model.status_code == 404


async def test_the_most_probable_of_several_outputs_are_answered_with() -> None:
    engine = ScriptedEngine()
    take = engine._output

    def rated(ids: Any, text: Any, params: Any, outputs: Any, finished: bool) -> Any:
        for output in outputs:
            output.cumulative_logprob = [-9.0, -1.0, -5.0, -2.0][output.index]
            output.stop_reason = output.index
        return take(ids, text, params, outputs, finished)

    engine._output = rated  # type: ignore[method-assign]
    async with serving(engine) as server:
        answer = (await server.complete(n=2, best_of=4)).json()
        chat = await server.chat(best_of=2)
    assert [(c["index"], c["stop_reason"]) for c in answer["choices"]] == [(0, 1), (1, 3)]
    assert all(c["logprobs"] is None for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4 * len("Hello world")
    assert chat.status_code == 400 and chat.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize("form", [form for form, _ in FORMATS])
async def test_a_model_with_the_tokens_fills_in(form: str) -> None:
    tags = form.replace("{prefix}", " ").replace("{suffix}", " ").split()
    engine = ScriptedEngine()
    encode = engine.tokenizer.encode

    def known(text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] if text in tags else encode(text)

    engine.tokenizer.encode = known  # type: ignore[method-assign]
    async with serving(engine) as server:
        answer = await server.complete(prompt="a{", suffix="}b", return_token_ids=True)
        assert answer.status_code == 200, answer.text
        ids = answer.json()["choices"][0]["prompt_token_ids"]
        assert "".join(map(chr, ids)) == form.format(prefix="a{", suffix="}b")
        for wrong in ({"prompt": [1]}, {"echo": True}):
            refused = await server.complete(**{"suffix": "b", **wrong})
            assert refused.json()["error"]["param"] == "suffix"
        assert (await server.complete(suffix="")).status_code == 200
        assert (await server.chat(suffix="b")).status_code == 400
