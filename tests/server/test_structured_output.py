"""Structured output through ``treadle serve`` and the official client."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from process import Process, served

pytestmark = pytest.mark.early

HELLO: Any = [{"role": "user", "content": "hello"}]
HOT: dict[str, Any] = {"model": "tiny", "temperature": 2.0, "max_tokens": 150}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
BOMB = {
    "guided_json": {"type": "string", "maxLength": 100000},
    "guided_decoding_backend": "outlines",
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {field: {"enum": ["a", "b"]}},
                "required": [field],
                "additionalProperties": False,
            },
        },
    }
    for name, field in (("get_weather", "city"), ("get_time", "zone"))
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    from treadle.testing.checkpoints import make_checkpoint

    model = make_checkpoint(
        tmp_path_factory.mktemp("tiny"), tokenizer=True, max_position_embeddings=512
    )
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ("--tool-call-parser", "hermes", "--logits-processors", "repetition_window")
    with served(model, log, "--served-model-name", "tiny", *options) as process:
        yield process
        process.signal(signal.SIGTERM)
        assert process.ends() == 0
        assert "Traceback" not in log.read_text()


@pytest.fixture
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client
    assert server.settles()


def texts(client: openai.OpenAI, count: int = 6, **options: Any) -> list[str]:
    """What came to its end, of requests that run together."""

    def ask(seed: int) -> Any:
        answer = client.chat.completions.create(messages=HELLO, seed=seed, **{**HOT, **options})
        return answer.choices[0]

    with ThreadPoolExecutor(count) as pool:
        choices = list(pool.map(ask, range(count)))
    assert {c.finish_reason for c in choices} <= {"stop", "length"}
    ended = [c.message.content for c in choices if c.finish_reason == "stop"]
    assert ended
    return ended


def test_response_format(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    for text in texts(client, response_format=form):
        jsonschema.validate(json.loads(text), PERSON)
    for text in texts(client, count=12, response_format={"type": "json_object"}):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("backend", ["llguidance", "outlines", "lm-format-enforcer"])
def test_every_spelling_with_every_backend(client: openai.OpenAI, backend: str) -> None:
    named = {"guided_decoding_backend": backend}
    for text in texts(client, extra_body={"guided_json": PERSON, **named}):
        jsonschema.validate(json.loads(text), PERSON)
    for text in texts(client, extra_body={"guided_regex": "[ab]{3}", **named}):
        assert re.fullmatch("[ab]{3}", text)
    body = {"structured_outputs": {"choice": ["yes", "no"]}, **named}
    assert set(texts(client, extra_body=body)) <= {"yes", "no"}


def test_a_grammar_and_a_whitespace_pattern(client: openai.OpenAI) -> None:
    body = {"guided_grammar": 'root ::= "<" [a-z]+ ">"'}
    assert all(re.fullmatch("<[a-z]+>", text) for text in texts(client, extra_body=body))
    body = {"guided_json": PERSON, "guided_whitespace_pattern": "  "}
    for text in texts(client, extra_body=body):
        assert re.match(r'\{(  )?"name"(  )?:(  )?"', text)


TAG = {
    "type": "tag",
    "begin": "e>",
    "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
    "end": "</a>",
}
TAGGED = {"type": "triggered_tags", "triggers": ["e"], "tags": [TAG], "at_least_one": True,
          "excludes": ["b"], "stop_after_first": True}  # fmt: skip


def test_structural_tags(client: openai.OpenAI) -> None:
    spellings: list[dict[str, Any]] = [
        {"response_format": {"type": "structural_tag", "format": TAGGED}},
        {"extra_body": {"structured_outputs": {"structural_tag": {"format": TAG}}}},
        {"extra_body": {"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}}},
    ]
    for fields in spellings:
        for text in texts(client, **fields):
            assert re.fullmatch(r"(?s)[^be]*e>(1|2)</a>", text)


def test_names_of_sglang(client: openai.OpenAI) -> None:
    for text in texts(client, extra_body={"json_schema": json.dumps(PERSON)}):
        jsonschema.validate(json.loads(text), PERSON)
    assert set(texts(client, extra_body={"regex": "[xy]"})) <= {"x", "y"}
    assert set(texts(client, extra_body={"ebnf": 'root ::= "go"'})) == {"go"}


def test_options_of_vllm(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}}}
    options: dict[str, Any] = {
        "json": schema,
        "disable_any_whitespace": True,
        "disable_additional_properties": True,
        "backend": "guidance:no-fallback",
    }
    found = set(texts(client, count=12, extra_body={"structured_outputs": options}))
    assert found <= {"{}", '{"a":1}', '{"a":2}', '{"b":3}', '{"a":1,"b":3}', '{"a":2,"b":3}'}
    for name in (
        "auto",
        "auto:no-fallback",
        "guidance",
        "outlines:no-fallback",
        "lm-format-enforcer:no-fallback",
    ):
        fields = {"structured_outputs": {"choice": ["x"], "backend": name}}
        assert set(texts(client, extra_body=fields)) == {"x"}
    named = "guidance:no-fallback,disable-any-whitespace,no-additional-properties"
    old = {"guided_json": schema, "guided_decoding_backend": named}
    assert set(texts(client, count=12, extra_body=old)) <= found | {"{}", '{"a":1}', '{"a":2}', '{"b":3}',
                                                                   '{"a":1,"b":3}', '{"a":2,"b":3}'}  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="'fast' is no option of a backend"):
        texts(client, extra_body={**old, "guided_decoding_backend": "guidance:fast"})


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_enforced_is_said(client: openai.OpenAI, stream: bool) -> None:
    """A format that no standard has, and what a schema has beyond a grammar if it need not be strict."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "phone", "maxLength": 2}},
        "required": ["a"],
        "additionalProperties": False,
    }

    def headers(schema: dict[str, Any], **fields: Any) -> Any:
        form: Any = {"name": "p", "schema": schema, **fields}
        raw = client.chat.completions.with_raw_response.create(
            messages=HELLO, stream=stream, **HOT,
            response_format={"type": "json_schema", "json_schema": form},
        )  # fmt: skip
        if stream:
            for _ in raw.parse():
                pass
        return raw.headers

    assert headers(schema).get("x-unenforced") == "the format phone at $.properties.a"
    assert "x-unenforced" not in headers(PERSON, strict=False)
    assert "x-unenforced" not in headers(PERSON)
    deep = {**schema, "not": {"properties": {"a": {"pattern": "^x"}}}}
    with pytest.raises(openai.BadRequestError, match="not at"):
        headers(deep)
    with pytest.raises(openai.BadRequestError, match="not at"):
        headers(deep, strict=True)
    assert headers(deep, strict=False)["x-unenforced"].startswith("not at $; the format phone")


def test_two_backends_at_once_streamed(client: openai.OpenAI) -> None:
    def ask(seed: int) -> tuple[str, str | None]:
        backend = ("llguidance", "outlines", "lm-format-enforcer")[seed % 3]
        stream = client.completions.create(
            prompt="x", seed=seed, stream=True, **HOT,
            extra_body={"guided_json": PERSON, "guided_decoding_backend": backend},
        )  # fmt: skip
        text, reason = "", None
        for chunk in stream:
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
        return text, reason

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(ask, range(9)))
    assert any(reason == "stop" for _, reason in answers)
    for text, reason in answers:
        if reason == "stop":
            jsonschema.validate(json.loads(text), PERSON)


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}


LOOP: dict[str, Any] = {"$ref": "#"}
REMOTE: dict[str, Any] = {"$ref": "http://localhost/schema.json"}
MISTYPED: dict[str, Any] = {"type": "stsring"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "("}, "guided_regex", "cannot compile"),
    ({"guided_json": {"type": "array", "contains": {"pattern": "a"}}}, "guided_json", "contains"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": MISTYPED}, "guided_json", "stsring"),
    ({"guided_json": LOOP}, "guided_json", "llguidance: "),
    ({"guided_json": REMOTE}, "guided_json", "localhost"),
    ({"guided_json": PERSON, "guided_whitespace_pattern": "("}, "guided_json", "cannot compile"),
    ({"guided_choice": []}, "guided_choice", "non-empty"),
    (
        {"guided_regex": "a", "guided_decoding_backend": "nope"},
        "guided_decoding_backend",
        "installed are guidance, llguidance, lm-format-enforcer, outlines, xgrammar",
    ),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "cannot"),
    (
        {"guided_grammar": "root ::= [a]", "guided_decoding_backend": "lm-format-enforcer"},
        "guided_grammar",
        "lm-format-enforcer: grammars of the kind ebnf are not supported",
    ),
    ({"guided_json": PERSON, "guided_regex": "a"}, "structured_outputs", "one constraint"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "without a constraint"),
    (
        {"guided_regex": "a", "guided_whitespace_pattern": " "},
        "guided_whitespace_pattern",
        "belongs to json",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot compile"),
    ({"structured_outputs": {}}, "structured_outputs", "without a constraint"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "needs a format"),
    ({"response_format": of_schema(MISTYPED)}, "response_format", "stsring"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "needs a format"),
    ({"response_format": {"type": "poem"}}, "response_format.type", "poem"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "not JSON"),
    (
        {"structured_outputs": {"regex": "a", "backend": "nope"}},
        "guided_decoding_backend",
        "'nope'",
    ),
    ({"structured_outputs": {"json": PERSON, "poem": 1}}, "structured_outputs", "poem"),
    ({"regex": "("}, "regex", "cannot compile"),
    ({"ebnf": "root ::= ("}, "ebnf", "cannot"),
    ({"json_schema": "{"}, "json_schema", "not JSON"),
    (
        {
            "structured_outputs": {
                "json": PERSON,
                "disable_any_whitespace": True,
                "whitespace_pattern": " ",
            }
        },
        "guided_whitespace_pattern",
        "give one",
    ),
    (BOMB, "guided_json", "within 2 s of CPU"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_a_400(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    """Also for a stream: nothing has been sent before the grammar is ready."""
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.chat.completions.create(messages=HELLO, stream=stream, n=2, **HOT, extra_body=fields)
    assert error.value.param == param
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.completions.create(
            prompt=["a", "b"], stream=stream, **{**HOT, "max_tokens": 5}, extra_body=fields
        )
    assert error.value.param == param


IMPOSSIBLE: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "[a-z]+", "allowed_token_ids": [3, 4]}, "allowed_token_ids", "leave"),
    ({"guided_choice": ["b"], "bad_words": ["b"]}, "bad_words", "leave"),
    ({"guided_json": PERSON, "allowed_token_ids": [3]}, "allowed_token_ids", "leave"),
    ({"guided_regex": "ab+", "bad_words": ["b", "ab"]}, "bad_words", "leave"),
    ({"guided_regex": "(?=b)a"}, "guided_regex", "look|no text matches|NFA"),
    ({"guided_regex": r"[^\x00-\U0010ffff]"}, "guided_regex", "dead end|missing tokens|regex"),
    ({"guided_grammar": 'start: start "a"'}, "guided_grammar", "dead end|not supported"),
    ({"guided_grammar": 'start: "a" x\nx: x "b"'}, "guided_grammar", "dead end|not supported"),
]


@pytest.mark.parametrize("backend", ["llguidance", "outlines", "lm-format-enforcer"])
@pytest.mark.parametrize(("fields", "param", "message"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_what_no_token_fulfils_is_a_400(
    client: openai.OpenAI, backend: str, fields: dict[str, Any], param: str, message: str
) -> None:
    """Whether that turns out with the first token or with a later one."""
    body = {**fields, "guided_decoding_backend": backend}
    if param == "bad_words" and fields["bad_words"][0] == "b":
        body["ignore_eos"] = True
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.chat.completions.create(messages=HELLO, **HOT, extra_body=body)
    assert error.value.param == param
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.completions.create(prompt=[7, 8], **HOT, extra_body=body)
    assert error.value.param == param
    with pytest.raises(openai.APIError, match=message) as streamed:
        for _ in client.completions.create(prompt=[7, 8], stream=True, **HOT, extra_body=body):
            pass
    assert streamed.value.type == "invalid_request_error"


def test_a_forced_call_that_no_token_begins(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids") as error:
        client.chat.completions.create(
            messages=HELLO,
            tools=TOOLS,
            tool_choice="required",
            extra_body={"allowed_token_ids": [3]},
            **HOT,
        )
    assert error.value.param == "allowed_token_ids"


def test_ids_that_nothing_may_use(client: openai.OpenAI) -> None:
    """The same without a grammar, before the engine and in the middle of an output."""
    for body in (
        {"allowed_token_ids": [37], "bad_words": ["F"]},
        {"allowed_token_ids": [257], "min_tokens": 3},
        {"allowed_token_ids": [37], "bad_words": ["FF"]},
    ):
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids") as error:
            client.completions.create(prompt=[1, 2], **HOT, extra_body=body)
        assert error.value.param == "allowed_token_ids"


async def test_too_many_grammars_are_a_429(server: Process) -> None:
    """Those who go leave their places to others."""
    import asyncio

    import httpx

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

        async def ask(i: int) -> httpx.Response:
            fields = {"guided_regex": f"(a{{1,1000}}){{1,{1000 + i}}}", "prompt": "x"}
            fields["guided_decoding_backend"] = "outlines"
            return await http.post("/v1/completions", json=fields)

        tasks = [asyncio.create_task(ask(i)) for i in range(48)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        answer = done.pop().result()
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert "max_num_queued_grammars allows 64" in answer.text
        assert server.metric("treadle_num_grammars_waiting") > 0
        assert server.metric("treadle_grammars_rejected_total") > 0
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert server.settles()
    assert server.metric("treadle_num_grammars_waiting") == 0


def test_the_schema_of_a_tool_may_be_wrong(client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": bad}}]
    with pytest.raises(openai.BadRequestError, match="cannot compile") as error:
        client.chat.completions.create(messages=HELLO, tools=tools, tool_choice="required", **HOT)
    assert error.value.param == "tools"


def test_arguments_of_a_logits_processor(client: openai.OpenAI) -> None:
    """Two tokens are so likely that an output repeats one of them, unless it must not."""
    body = {"ignore_eos": True, "logit_bias": {"70": 50.0, "72": 50.0}}
    options: dict[str, Any] = {"model": "tiny", "prompt": [1, 2], "temperature": 0}
    options["max_tokens"] = 30
    body["return_token_ids"] = True
    free: Any = client.completions.create(**options, extra_body=body).choices[0]
    assert set(free.token_ids) <= {70, 72}
    body["extra_args"] = {"repetition_window": {"ngram": 1}}
    restricted: Any = client.completions.create(**options, extra_body=body).choices[0]
    assert len(set(restricted.token_ids)) == 30
    for extra, message in (
        ({"repetition_window": {"size": 1}}, "unknown field `size`"),
        ({"nosuch": {}}, "logits_processors: repetition_window"),
        ({"repetition_window": 3}, "Expected object"),
        ([], "Expected object"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=message) as error:
                client.completions.create(
                    **options, stream=stream, extra_body={**body, "extra_args": extra}
                )
            assert str(error.value.param).startswith("extra_args")


def test_others_go_on_while_a_bomb_is_refused(client: openai.OpenAI) -> None:
    refused: list[Exception] = []

    def bomb() -> None:
        fields = {"guided_regex": "(a{1,1000}){1,1000}", "guided_decoding_backend": "outlines"}
        try:
            client.chat.completions.create(messages=HELLO, **HOT, extra_body=fields)
        except openai.BadRequestError as error:
            refused.append(error)

    texts(client, 1, extra_body={"guided_regex": "a", "guided_decoding_backend": "outlines"})
    thread = threading.Thread(target=bomb)
    start_time = time.monotonic()
    thread.start()
    tokens, longest = 0, 0.0
    while thread.is_alive():
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        last = time.monotonic()
        for _ in stream:
            tokens += 1
            longest = max(longest, time.monotonic() - last)
            last = time.monotonic()
    assert refused and tokens > 200 and longest < (last - start_time) / 2


@pytest.mark.parametrize("choice", ["required", "get_time"])
def test_a_call_is_forced(client: openai.OpenAI, choice: str) -> None:
    tool_choice: Any = choice
    if choice != "required":
        tool_choice = {"type": "function", "function": {"name": choice}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    called = []
    for seed in range(6):
        answer = client.chat.completions.create(
            messages=HELLO,
            tools=TOOLS,
            tool_choice=tool_choice,
            seed=seed,
            response_format=form,
            **HOT,
        )
        if answer.choices[0].finish_reason != "length":
            assert answer.choices[0].finish_reason == "tool_calls"
            called += answer.choices[0].message.tool_calls or []
    assert called
    for call in called:
        field = {"get_weather": "city", "get_time": "zone"}[call.function.name]
        assert choice in ("required", call.function.name)
        assert json.loads(call.function.arguments)[field] in ("a", "b")


def test_a_client_that_leaves_while_its_grammar_is_compiled(server: Process) -> None:
    import httpx

    body = {"prompt": "x", "guided_json": {"type": "string", "maxLength": 200000}}
    body["guided_decoding_backend"] = "outlines"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    assert server.settles()
