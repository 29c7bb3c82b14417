"""What is seen of a server from outside: probes, fingerprints, silent streams, granted lengths."""

from __future__ import annotations

import pytest
from scripted import ScriptedEngine
from serving import events, serving, until

from treadle.entrypoints.async_llm import AsyncLLM
from treadle_server.engine import Engine


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_probes_may_use_head(path: str) -> None:
    async with serving() as server:
        response = await server.client.head(path)
        assert (response.status_code, response.content) == (200, b"")
        server.context.is_hung = None
        server.context.draining = True
        assert (await server.client.head(path)).status_code == (503 if path == "/ready" else 200)


async def test_every_answer_has_the_same_fingerprint() -> None:
    async with serving() as server:
        fingerprints = {
            (await server.client.get("/version")).json()["system_fingerprint"],
            (await server.client.get("/plugins")).json()["system_fingerprint"],
        }
        for ask in (server.chat, server.complete):
            fingerprints.add((await ask()).json()["system_fingerprint"])
            chunks = events((await ask(stream=True)).text)[:-1]
            fingerprints |= {chunk["system_fingerprint"] for chunk in chunks}
    (fingerprint,) = fingerprints
    assert fingerprint.startswith("fp_") and len(fingerprint) == 15


async def test_the_fingerprint_is_of_the_model_and_not_of_its_names() -> None:
    fingerprints = []
    for names, name in ((["a"], "m"), (["b"], "m"), (["a"], "other")):
        engine = ScriptedEngine(names=names)
        model = type(engine.config.model)(model=name, served_model_name=names)
        engine.config = type(engine.config)(model=model)
        async with serving(engine) as server:
            fingerprints.append(server.context.fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@pytest.mark.parametrize("silent_step", [0, 2])
async def test_a_silent_stream_is_kept_alive(silent_step: int) -> None:
    """The engine waits until the client has seen two comments."""
    engine = ScriptedEngine(["a", "b", "c"])
    async with serving(engine, sse_keep_alive_interval=0.02) as server:
        engine.healthy.clear()

        async def hold(step: int) -> None:
            if step == silent_step:
                await engine.healthy.wait()

        engine.hold = hold
        comments, text = 0, ""
        body = {"prompt": "ab", "stream": True}
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                text += line + "\n"
                comments += line == ": keep-alive"
                if comments == 2:
                    engine.healthy.set()
    *chunks, done = events(text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abc" and done == "[DONE]"


async def test_a_lively_stream_has_no_comments() -> None:
    async with serving() as server:
        assert ": keep-alive" not in (await server.chat(stream=True)).text


async def test_an_error_after_a_comment_is_an_event() -> None:
    engine = ScriptedEngine(pause=30)
    options = {"sse_keep_alive_interval": 0.02, "request_timeout": 0.2}
    async with serving(engine, **options) as server:
        response = await server.complete(stream=True)
        await until(lambda: engine.running == 0)
    error, done = events(response.text)
    assert response.status_code == 200 and ": keep-alive" in response.text
    assert error["error"]["code"] == "request_timeout" and done == "[DONE]"


async def test_no_request_is_granted_more_than_the_checkpoint_says() -> None:
    engine = ScriptedEngine(list("abcdefgh"), output_limit=3)
    async with serving(engine) as server:
        for ask in (server.chat, server.complete):
            choice = (await ask(max_tokens=5)).json()["choices"][0]
            assert choice["finish_reason"] == "length" and engine.params
            assert engine.params.max_tokens == 3
            await ask(max_tokens=2)
            assert engine.params.max_tokens == 2
            await ask(max_tokens=5, min_tokens=4)
            assert engine.params.max_tokens == 4
            await ask(max_tokens=5, ignore_eos=True)
            assert engine.params.max_tokens == 5


def test_the_real_engine_has_what_the_server_asks_of_one() -> None:
    members = {name for name in vars(Engine) if not name.startswith("_")}
    assert members <= set(dir(AsyncLLM)) | {"config", "plugins"}
