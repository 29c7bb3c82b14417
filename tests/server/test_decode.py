from __future__ import annotations

import time
from contextlib import suppress

import pytest

from treadle_server.decode import FORBIDDEN_FIELDS, RequestDecoder, check_depth
from treadle_server.errors import APIError
from treadle_server.wire.chat import ChatRequest
from treadle_server.wire.completions import CompletionRequest
from treadle_server.wire.messages import AssistantMessage, ToolMessage

CHAT, TEXT = RequestDecoder(ChatRequest), RequestDecoder(CompletionRequest)


def nested(depth: int, wide: int = 1) -> bytes:
    items = b",".join([b"[" * (depth - 2) + b"]" * (depth - 2)] * wide)
    return b'{"unknown":[' + items + b'],"prompt":"a"}'


@pytest.mark.parametrize("depth", [3, 6, 63, 64])
@pytest.mark.parametrize("wide", [1, 80])
def test_json_may_nest_64_levels(depth: int, wide: int) -> None:
    assert TEXT.decode(nested(depth, wide))[0].prompt == "a"


@pytest.mark.parametrize("depth", [65, 66, 70, 1000, 100_000])
@pytest.mark.parametrize("wide", [1, 80])
def test_deeper_json_is_refused(depth: int, wide: int) -> None:
    with pytest.raises(APIError) as error:
        TEXT.decode(nested(depth, wide))
    assert (error.value.status, error.value.detail.code) == (400, "json_too_deep")


@pytest.mark.parametrize("text", ["[" * 200, '\\"' + "[" * 200, "\\\\\\\\", '\\\\\\"[[' * 50])
def test_brackets_in_strings_do_not_count(text: str) -> None:
    body = b'{"prompt":"' + text.encode() + b'","stop":["[","]"]}'
    assert isinstance(TEXT.decode(body)[0].prompt, str)


def test_no_body_of_ten_megabytes_holds_the_loop() -> None:
    for unit in (b"[", b"[]", b'"', b'\\"', b"[[[[[[]]]]]]", b"}", b"[{"):
        seconds = []
        for size in (1_000_000, 10_000_000):
            start_time = time.thread_time()  # other processes do not count
            with suppress(APIError):
                check_depth(unit * (size // len(unit)))
            seconds.append(time.thread_time() - start_time)
        assert seconds[1] < 30 * seconds[0] + 0.1, f"{unit!r} takes more than linear time"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "empty", None),
        (b"[]", "Expected object, got array", None),
        (b"{", "not valid JSON", None),
        (b"null", "Expected object", None),
        (b'{"prompt":"a"} x', "trailing", None),
        (b'{"prompt":"\xff"}', "UTF-8", None),
        (b'{"prompt":"\\ud800"}', "not valid JSON", None),
        (b'{"temperature":NaN}', "not valid JSON", None),
        (b'{"temperature":Infinity}', "not valid JSON", None),
        (b'{"temperature":1e999}', "out of range", "temperature"),
        (b'{"temperature":"hot"}', "Expected float", "temperature"),
        (b'{"max_tokens":1.5}', "Expected int", "max_tokens"),
        (b'{"n":true}', "got bool", "n"),
        (b'{"stop":["a",1]}', "Expected str", "stop[1]"),
        (b'{"logit_bias":{"a":1}}', "Expected int", "logit_bias"),
        (b'{"stream_options":{"include_usage":3}}', "bool", "stream_options.include_usage"),
        (b'{"response_format":{"type":"xml"}}', "Invalid enum value", "response_format.type"),
    ],
)
def test_a_mistake_is_placed(body: bytes, message: str, param: str | None) -> None:
    with pytest.raises(APIError, match=message) as error:
        TEXT.decode(body)
    assert error.value.status == 400
    assert error.value.detail.param == param


def test_null_is_the_same_as_nothing() -> None:
    fields = [f for f in ChatRequest.__struct_encode_fields__ if f != "messages"]
    nulls = ",".join(f'"{f}":null' for f in fields)
    request, ignored = CHAT.decode(b'{"messages":[],' + nulls.encode() + b"}")
    assert request == CHAT.decode(b'{"messages":[]}')[0]
    assert ignored == ""


def test_unknown_fields_are_ignored_and_named() -> None:
    request, ignored = TEXT.decode(b'{"prompt":"a","frobnicate":[1],"metadata":{},"bad name\\n":1}')
    assert request.prompt == "a"
    assert ignored == "frobnicate,metadata"


def test_a_strict_server_refuses_unknown_fields() -> None:
    strict = RequestDecoder(CompletionRequest, strict=True)
    assert strict.decode(b'{"prompt":"a","n":null}')[0].prompt == "a"
    with pytest.raises(APIError, match="unknown field 'frobnicate'") as error:
        strict.decode(b'{"prompt":"a","frobnicate":1}')
    assert error.value.detail.param == "frobnicate"


@pytest.mark.parametrize("name", sorted(FORBIDDEN_FIELDS))
def test_dangerous_fields_are_refused_unless_they_say_nothing(name: str) -> None:
    for empty in ("null", "{}", "[]", '""', "false"):
        assert CHAT.decode(f'{{"messages":[],"{name}":{empty}}}'.encode())[0].messages == []
    with pytest.raises(APIError, match=f"{name} is not accepted") as error:
        CHAT.decode(f'{{"messages":[],"{name}":{{"x":1}}}}'.encode())
    assert (error.value.status, error.value.detail.param) == (400, name)


def test_messages_are_told_apart_by_role() -> None:
    body = b"""{"messages":[
        {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function",
         "function":{"name":"f","arguments":"{}"}}]},
        {"role":"tool","content":[{"type":"text","text":"4"}],"tool_call_id":"1"}]}"""
    first, second = CHAT.decode(body)[0].messages
    assert isinstance(first, AssistantMessage) and first.tool_calls is not None
    assert isinstance(second, ToolMessage) and second.tool_call_id == "1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ('{"role":"robot","content":"x"}', "messages[0].role"),
        ('{"content":"x"}', "messages[0]"),
        ('{"role":"user"}', "messages[0]"),
        ('{"role":"user","content":7}', "messages[0].content"),
        ('{"role":"user","content":[{"type":"smell"}]}', "messages[0].content[0].type"),
        ('{"role":"user","content":[{"type":"text"}]}', "messages[0].content[0]"),
    ],
)
def test_a_wrong_message_is_placed(message: str, param: str) -> None:
    with pytest.raises(APIError) as error:
        CHAT.decode(f'{{"messages":[{message}]}}'.encode())
    assert error.value.detail.param == param
