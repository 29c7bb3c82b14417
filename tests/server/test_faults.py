"""Errors from the engine, before and inside of a stream, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product

import pytest
from scripted import ScriptedEngine
from serving import events, serving, until

from treadle.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
)


def failing(error: BaseException, failing_step: int = 0) -> Callable[[ScriptedEngine, int], None]:
    def before(_: ScriptedEngine, step: int) -> None:
        if step == failing_step:
            raise error

    return before


ERRORS: list[tuple[Exception, int, str | None]] = [
    (RequestError("no", param="top_k"), 400, None),
    (ContextLengthError("9 tokens do not fit 8", param="prompt"), 400, "context_length_exceeded"),
    (QueueFullError("1024 wait already"), 429, "queue_full"),
    (EngineDeadError("gone: /secret/path 0x7f"), 503, "engine_dead"),
    (OutOfMemoryError("no room"), 503, "out_of_memory"),
    (EngineError("the sampler failed"), 500, "request_failed"),
    (RuntimeError("/secret/path 0x7f"), 500, "internal_error"),
]


async def test_an_error_before_the_first_token_is_an_ordinary_answer() -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        for error, status, code in ERRORS:
            engine.before = failing(error)
            for ask, stream in product((server.chat, server.complete), (False, True)):
                response = await ask(stream=stream)
                body = response.json()["error"]
                assert (response.status_code, body["code"]) == (status, code)
                assert response.headers["content-type"] == "application/json"
                assert "secret" not in response.text
                if status == 429:
                    assert int(response.headers["retry-after"]) > 0
        assert engine.running == 0


@pytest.mark.parametrize("failing_step", [1, 3])
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_an_error_inside_a_stream_is_one_event_then_done(
    failing_step: int, route: str
) -> None:
    engine = ScriptedEngine(before=failing(ValueError("/secret 0x7f"), failing_step))
    async with serving(engine) as server:
        response = await getattr(server, route)(stream=True)
    *chunks, error, done = events(response.text)
    assert response.status_code == 200 and done == "[DONE]"
    assert error["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert chunks and not any("error" in c for c in chunks)


async def test_an_output_that_the_engine_gave_up_is_an_error() -> None:
    async with serving(ScriptedEngine(reason="error")) as server:
        response = await server.chat()
        *_, error, done = events((await server.chat(stream=True)).text)
    assert response.status_code == 500 and response.json()["error"]["code"] == "request_failed"
    assert error["error"]["code"] == "request_failed" and done == "[DONE]"


@pytest.mark.parametrize("method", ["render", "encode"])
async def test_a_renderer_that_raises_costs_its_request_alone(method: str) -> None:
    engine = ScriptedEngine()

    def fail(*_: object, **__: object) -> None:
        raise KeyError("/secret 0x7f")

    async with serving(engine) as server:
        setattr(engine.renderer, method, fail)
        response = await server.chat()
        assert response.status_code == 500 and "secret" not in response.text
        assert response.json()["error"]["code"] == "internal_error"
        assert (await server.complete()).status_code == 200
        assert engine.running == 0


async def test_one_failing_prompt_ends_its_siblings() -> None:
    engine = ScriptedEngine(pause=0.01)

    def before(_: ScriptedEngine, step: int) -> None:
        if engine.running == 3 and step == 2:
            raise EngineError("boom")

    engine.before = before
    async with serving(engine) as server:
        for stream in (False, True):
            await server.complete(prompt=["a", "b", "c"], stream=stream)
            assert engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("wait", [0.0, 0.1])
async def test_a_client_that_leaves_aborts_its_request(
    stream: bool, prompt: str | list[str], wait: float
) -> None:
    """``wait`` 0 is before the first token (a long queue), 0.1 is in the middle of the output."""
    engine = ScriptedEngine(["x"] * 10_000, pause=0.01 if wait else 10)
    count = 1 if isinstance(prompt, str) else len(prompt)
    async with serving(engine) as server:
        request = asyncio.create_task(server.complete(prompt=prompt, stream=stream))
        await until(lambda: engine.running == count)
        await asyncio.sleep(wait)
        request.cancel()
        await until(lambda: engine.running == 0, wait=2)
        assert engine.aborted == count
        assert (await server.client.get("/health")).status_code == 200
        await until(lambda: server.context.metrics.active == 0)
        assert len(server.context.active_requests) == 0


async def test_a_client_that_leaves_inside_its_body_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"
        )
        await until(lambda: server.context.metrics.active == 1)
        writer.close()
        await until(lambda: server.context.metrics.active == 0)
        page = (await server.client.get("/metrics")).text
    assert 'route="/v1/completions",status="499"' in page
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_many_clients_that_leave_at_random_leave_nothing() -> None:
    engine = ScriptedEngine(["x"] * 50, pause=0.002)
    async with serving(engine) as server:

        async def leave(i: int) -> None:
            request = asyncio.create_task(server.chat(stream=i % 2 == 0))
            await asyncio.sleep(0.001 * (i % 60))
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

        for start in range(0, 120, 40):
            await asyncio.gather(*(leave(start + i) for i in range(40)))
        await until(lambda: engine.running == 0 and server.context.metrics.active == 0)
        assert (await server.chat()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_past_its_deadline_is_stopped(stream: bool) -> None:
    engine = ScriptedEngine(["a", *"x" * 1000], pause=0.05)
    async with serving(engine, request_timeout=0.2) as server:
        response = await server.chat(stream=stream)
        assert engine.running == 0
    if stream:
        *_, error, done = events(response.text)
        assert done == "[DONE]" and error["error"]["code"] == "request_timeout"
    else:
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "request_timeout"


async def test_a_reader_that_stops_reading_is_dropped_and_others_are_not() -> None:
    engine = ScriptedEngine(["x" * 20_000] * 2000, max_model_len=4000)
    async with serving(engine, write_timeout=0.3) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        body = b'{"prompt":"a","stream":true,"max_tokens":2000}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await until(lambda: engine.running == 1)
        engine.text, slow = ["quick"], engine.text
        assert len(slow) == 2000
        assert (await server.complete()).json()["choices"][0]["text"] == "quick"
        await until(lambda: engine.running == 0, wait=4)
        assert engine.aborted == 1
        writer.close()


async def test_ids_are_made_here_and_a_client_only_labels() -> None:
    engine = ScriptedEngine(pause=0.01)
    async with serving(engine) as server:
        headers = {"x-request-id": "mine"}
        body = {"prompt": "a", "request_id": "mine"}
        responses = await asyncio.gather(
            *(server.post("/v1/completions", body, headers=headers) for _ in range(20))
        )
        assert {r.headers["x-request-id"] for r in responses} == {"mine"}
        assert len({r.json()["id"] for r in responses}) == 20
        assert len(set(engine.ids)) == 20 and "mine" not in engine.ids
        strange = await server.raw(
            b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: a b\xff\r\n\r\n"
        )
        long = await server.client.get("/version", headers={"x-request-id": "x" * 129})
    assert b"a b\xff" not in strange and b"x-request-id: " in strange
    assert len(long.headers["x-request-id"]) == 32
