"""A plugin that does not return inside of a step is named, by the server of an engine in a process."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import PROMPT, USE, config, name
from faulty import plugins_of
from serving import serving, until

from treadle import AsyncLLM, SamplingParams
from treadle.api.kinds import SCHEDULING_POLICIES
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.processes.logs import LogSetup
from treadle_server import call_monitor
from treadle_server.call_monitor import stuck_call, stuck_calls
from treadle_server.load_monitor import last_step

pytestmark = pytest.mark.own_python

# kind, the method that hangs, the parameters of a request that needs it
WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("scheduling_policies", "sort_key", {"priority": 1}),
    ("executors", "execute_model", {}),
    ("models", "forward", {}),
    ("quantization", "apply", {}),
    ("attention_backends", "forward", {}),
    ("kernel_ops", "call", {}),
    ("logits_processors", "apply", {"extra_args": {"odd": "odd"}}),
    ("structured_output", "fill_bitmask", {}),
    ("structured_output", "accept_token", {}),
    ("structured_output", "is_terminated", {}),
    ("stat_loggers", "record", {}),
]
SAID_AS = {"kernel_ops": "rms_norm"}


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Path]:
    """The folder in which child processes can be asked, as those of a server can."""
    folder = tmp_path / "steps"
    folder.mkdir()
    log = logging.getLogger("treadle")
    others = [handler for handler in log.handlers if isinstance(handler, LogSetup)]
    for handler in others:  # of servers that ran in this process before
        log.removeHandler(handler)
    setup = LogSetup("treadle_server.logs:start", {"level": "warning", "steps": str(folder)})
    log.addHandler(setup)
    yield folder
    log.removeHandler(setup)
    for handler in others:
        log.addHandler(handler)


@asynccontextmanager
async def server_of(folder: Path) -> AsyncIterator[Any]:
    use: dict[str, Any] = {}
    faults = {}
    for kind, method, _ in WAYS:
        if kind != "structured_output":
            faults[name(kind)] = {"method": method, "failure": str(pipe(folder, kind, method))}
        use |= USE[kind]
    engine: Any = AsyncLLM(config=config("kernel_ops", others=faults, **use))
    async with engine, serving(engine, hang_timeout=0.05) as server:
        yield server


def pipe(folder: Path, kind: str, method: str) -> Path:
    return folder / f"{kind}-{method}.pipe"


async def complete(engine: Any, **params: Any) -> str:
    plain = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "output_kind": "final"}
    async for output in engine.generate(PROMPT, SamplingParams(**{**plain, **params})):
        last = output.outputs[0]
    return str(last.finish_reason)


async def test_the_plugin_is_named_until_it_returns(
    tmp_path: Path,
    steps: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("treadle_server.lifecycle.HEARTBEAT", 0.02)
    for kind, method, _ in WAYS:
        os.mkfifo(pipe(tmp_path, kind, method))
    async with server_of(tmp_path) as server:
        context, engine = server.context, server.context.engine
        for kind, method, params in WAYS:
            door = pipe(tmp_path, kind, method)
            if kind == "structured_output":
                pid = engine._client.pid  # the process that compiles grammars tries them, too
                source = StructuredOutputsParams(regex=f"{method} {door} 3 {pid}")
                params = {"structured_outputs": source}
            caplog.clear()
            door.with_suffix(".closed").touch()
            request = asyncio.create_task(complete(engine, **params))
            said_as = SAID_AS.get(kind, method)
            words = f"{name(kind)} from odd.py "
            # A busy machine may answer late, too.
            await until(lambda words=words: words in context.stuck_calls, 60)
            assert f" has been in {said_as}" in context.stuck_calls
            assert " (odd.py, line " in context.stuck_calls
            # The core reads this property outside of all calls that are timed.
            assert (" for " in context.stuck_calls) == (method != "is_terminated")
            await until(lambda words=words: words in caplog.text, 60)
            assert words in str(context.is_hung)
            for path in ("/health", "/ready"):
                response = await server.client.get(path)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (503, "engine_unresponsive")
                assert words in error["message"] and said_as in error["message"]
            door.with_suffix(".closed").unlink()
            await asyncio.to_thread(door.write_text, "")
            await until(lambda: context.is_hung is None and not context.stuck_calls, 60)
            assert await request == "length"


async def test_a_backend_that_hangs_beside_the_step_is_named(tmp_path: Path, steps: Path) -> None:
    door = pipe(tmp_path, "structured_output", "fill_bitmask")
    os.mkfifo(door)
    door.with_suffix(".closed").touch()
    engine: Any = AsyncLLM(config=config("structured_output", num_pages=1024))
    async with engine, serving(engine, hang_timeout=0.05) as server:
        sources = [f"none {door} 1 0"] * 79
        sources += [f"fill_bitmask {door} 40 {engine._client.pid}"]
        grammars = [StructuredOutputsParams(regex=source) for source in sources]
        # By the fortieth step all of them run, more than are filled in the main thread.
        requests = [
            asyncio.create_task(complete(engine, structured_outputs=grammar, max_tokens=80))
            for grammar in grammars
        ]
        context, words = server.context, f"{name('structured_output')} from odd.py "
        await until(lambda: words in context.stuck_calls, 60)
        assert " has been in fill_bitmask for " in context.stuck_calls
        door.with_suffix(".closed").unlink()
        await asyncio.to_thread(door.write_text, "")
        assert await asyncio.gather(*requests) == ["length"] * 80


LOOP = """
from treadle.api import impl

TREADLE = {"scheduling_policies": ["loop", "quick"]}


class Policy:
    def sort_key(self, request):
        while request.inner is not None and not request.ended.is_set():
            request.inner.sort_key(request.none)
            request.called.set()
        return (0,)


@impl
def treadle_scheduling_policy(name):
    return Policy()
"""


def test_a_loop_is_named_and_not_what_it_calls(tmp_path: Path) -> None:
    plugins = plugins_of(tmp_path, LOOP)
    loop, quick = (plugins.create_guarded(SCHEDULING_POLICIES, key) for key in ("loop", "quick"))
    request: Any = SimpleNamespace(called=threading.Event(), ended=threading.Event(), inner=quick)
    request.none = SimpleNamespace(inner=None)
    thread = threading.Thread(target=loop.sort_key, args=[request])
    thread.start()
    try:
        assert request.called.wait(60)
        words = stuck_call(thread.ident or 0)
    finally:
        request.ended.set()
        thread.join()
    assert (
        words.startswith("scheduling_policies:loop from ") and " has been in sort_key for " in words
    )
    assert stuck_call(threading.main_thread().ident or 0) == ""


def test_who_has_ended_is_left_out(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "4194305.calls"))  # more than the largest number of a process
    assert stuck_calls(tmp_path) == ""


LOCKED = """
import ctypes, os

from treadle.api import impl

TREADLE = {"scheduling_policies": ["locked"]}


def read(pipe):
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)


class Policy:
    def sort_key(self, request):
        return read(os.pipe()[0])


@impl
def treadle_scheduling_policy(name):
    return Policy()
"""


@pytest.mark.parametrize("thread", ["main", "treadle-bitmasks_0"])
def test_a_library_that_keeps_the_interpreters_lock_is_found(
    thread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_monitor, "ANSWER_SECONDS", 0.5)
    plugins, words = plugins_of(tmp_path, LOCKED), ""
    policy: Any = plugins.create_guarded(SCHEDULING_POLICIES, "locked")
    child = os.fork()
    if not child:
        call_monitor.CallMonitor(tmp_path).start()
        if thread == "main":
            policy.sort_key(None)
        threading.Thread(target=policy.sort_key, args=[None], name=thread).start()
        signal.pause()
    try:
        deadline = time.monotonic() + 60  # until the child has come so far
        while "called in" not in words and time.monotonic() < deadline:
            words = stuck_calls(tmp_path)
            time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert last_step(tmp_path) == "", "what is written here is not what it began to run"
    place = rf"called in sort_key \({tmp_path}/faulty_\w+\.py, line \d+\)"
    assert re.fullmatch(
        rf"process {child} runs no Python: a library keeps its lock, {place}", words
    )
