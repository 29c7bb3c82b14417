"""Draining, stopping, dying: everybody is answered before the process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from scripted import ScriptedEngine
from serving import events, serving, until

from treadle.api.stats import EngineStats
from treadle.errors import ConfigError, EngineDeadError
from treadle_server.config import server_from_options
from treadle_server.run import serve_engine


async def test_a_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    engine = ScriptedEngine(pause=0.1)
    async with serving(engine) as server:
        running = [asyncio.create_task(server.chat(stream=i % 2 == 0)) for i in range(8)]
        await until(lambda: engine.running == 8)
        server.signals.take(signal.SIGTERM)
        await until(lambda: server.context.draining)
        refused = await server.chat()
        ready, health = await server.client.get("/ready"), await server.client.get("/health")
        responses = await asyncio.gather(*running)
        await asyncio.wait_for(server.task, 5)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "draining"
    assert (ready.status_code, health.status_code) == (503, 200)
    assert health.json() == {"status": "draining"}
    for i, response in enumerate(responses):
        assert response.status_code == 200
        if i % 2:
            assert response.json()["choices"][0]["message"]["content"] == "Hello world"
        else:
            assert events(response.text)[-1] == "[DONE]" and "error" not in response.text
    assert engine.finished == 8 and engine.aborted == 0


@pytest.mark.parametrize("second_signal", [False, True])
async def test_what_does_not_finish_is_told_so(second_signal: bool) -> None:
    """Past the drain timeout, or at a second signal."""
    engine = ScriptedEngine(["a"] * 10_000, pause=0.02)
    async with serving(engine, drain_timeout=30.0 if second_signal else 0.3) as server:
        stream = asyncio.create_task(server.chat(stream=True))
        plain = asyncio.create_task(server.chat())
        await until(lambda: engine.running == 2)
        await asyncio.sleep(0.1)
        start_time = time.monotonic()
        server.signals.take(signal.SIGTERM)
        if second_signal:
            server.signals.take(signal.SIGINT)
        streamed, answered = await asyncio.gather(stream, plain)
        await asyncio.wait_for(server.task, 20)
        assert time.monotonic() - start_time < 25
    *_, error, done = events(streamed.text)
    assert error["error"]["code"] == "server_stopped" and done == "[DONE]"
    assert answered.status_code == 503 and answered.json()["error"]["code"] == "server_stopped"
    assert engine.running == 0
    assert server.lifecycle.num_cut_off == 2


async def test_an_idle_server_stops_at_once() -> None:
    async with serving() as server:
        await server.client.get("/health")  # leaves a kept connection behind
        server.signals.take(signal.SIGINT)
        await asyncio.wait_for(server.task, 20)


@pytest.mark.parametrize("idle", [False, True])
async def test_a_dead_engine_is_told_to_everybody_and_ends_the_server(idle: bool) -> None:
    engine = ScriptedEngine(["a"] * 10_000, pause=0.01)
    async with serving(engine) as server:
        tasks = []
        if not idle:
            tasks = [asyncio.create_task(server.chat(stream=s)) for s in (True, False)]
            await until(lambda: engine.running == 2)
            await asyncio.sleep(0.05)
        engine.dead = EngineDeadError("killed")
        health = await server.client.get("/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "engine_dead"
        for response in await asyncio.gather(*tasks):
            assert "engine_dead" in response.text
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(server.task, 6)


async def test_an_engine_that_hangs_is_ill_and_may_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle_server.lifecycle.HEARTBEAT", 0.02)
    engine = ScriptedEngine()
    async with serving(engine, hang_timeout=0.1) as server:
        engine.healthy.clear()
        assert (await server.client.get("/health")).status_code == 200  # a step may take a while
        await until(lambda: server.context.is_hung)
        for path in ("/health", "/ready"):
            response = await server.client.get(path)
            assert response.status_code == 503
            error = response.json()["error"]
            assert error["code"] == "engine_unresponsive"
            assert "a step of the engine has not ended for 0.1 s" in error["message"]
        assert (
            'treadle_engine_up{model_name="scripted"} 1.0'
            in (await server.client.get("/metrics")).text
        )
        engine.healthy.set()
        await until(lambda: not server.context.is_hung)
        assert (await server.client.get("/health")).status_code == 200


async def test_a_long_step_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes do not wait for the step, and only one beyond ``hang_timeout`` fails them."""
    monkeypatch.setattr("treadle_server.lifecycle.HEARTBEAT", 0.01)
    engine, asked = ScriptedEngine(), asyncio.Event()
    async with serving(engine, hang_timeout=600.0) as server:
        stats = engine.stats

        async def stats_in_a_long_step(timeout: float) -> EngineStats:
            assert timeout == 600.0
            asked.set()
            return await stats(timeout)

        engine.stats = stats_in_a_long_step  # type: ignore[method-assign]
        engine.healthy.clear()
        await asked.wait()
        for path in ("/health", "/ping", "/ready"):
            assert (await server.client.get(path)).status_code == 200
        assert not engine.healthy.is_set()
        engine.healthy.set()


def test_a_drain_that_cuts_requests_off_ends_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever supervises the server sees by the exit code that answers were lost."""
    engine = ScriptedEngine(["a"] * 10_000, pause=0.02)
    path = str(tmp_path / "socket")
    config = server_from_options({"uds": path, "drain_timeout": 0.3})
    streamed: list[str] = []

    def ask() -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        is_listening = False
        while not is_listening:
            time.sleep(0.02)
            with socket.socket(socket.AF_UNIX) as probe:
                is_listening = probe.connect_ex(path) == 0
        transport = httpx.HTTPTransport(uds=path)
        with (
            httpx.Client(transport=transport, base_url="http://localhost", timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                if not streamed:
                    os.kill(os.getpid(), signal.SIGTERM)
                streamed.append(line)

    client = threading.Thread(target=ask)
    client.start()
    with pytest.raises(SystemExit) as exc_info:
        serve_engine(lambda: engine, config)
    client.join()
    assert exc_info.value.code == 1
    assert "1 requests were cut off" in caplog.text
    assert "server_stopped" in "".join(streamed)


def test_an_engine_that_fails_while_the_application_is_imported_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As a thread leaves it there that is still importing it.
    monkeypatch.setitem(sys.modules, "litestar.concurrency", ModuleType("litestar.concurrency"))

    def build() -> ScriptedEngine:
        raise ConfigError("the model has too many layers")

    with pytest.raises(ConfigError, match="too many layers"):
        serve_engine(build, server_from_options({"port": 0}))
