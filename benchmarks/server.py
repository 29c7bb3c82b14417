"""What the HTTP server costs, without a model: CPU time of its process for each request and chunk.

An engine that answers at once stands behind the real server process. The client speaks raw HTTP
from this process, so that its cost is not counted. CPU time is used because it hardly depends on
what else the machine does; a rate "per core" is its inverse. Of paced scenarios, whose engine makes
a token every 20 ms, the gaps between chunks are reported too: ``bare-stream-paced`` shows how many of
them are the machine's and the client's.

    python benchmarks/server.py            # every scenario, one JSON line each
    python benchmarks/server.py chat-stream --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from treadle.api.sampling_params import SamplingParams
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig, from_options
from treadle.outputs import CompletionOutput, RequestOutput
from treadle.plugins import PluginManager
from treadle.text.assets import FrontendAssets
from treadle.text.parser_plugins import parser_watchdog
from treadle.text.text_pool import TextPool

CHUNKS = 200


class Words:
    """A tokenizer of one id for each word."""

    vocab_size, eos_token_id, special_token_ids, chat_template = 1000, 0, frozenset({0}), None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * (text.count(" ") + 1)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "word " * len(ids)

    def id_to_token(self, token: int) -> str:
        return "word "

    def token_bytes(self, token: int) -> bytes:
        return b"word "


class Turns:
    """A renderer without a template."""

    def render(self, messages: Sequence[Any], **_: Any) -> str:
        return " ".join(m["content"] for m in messages)

    def encode(self, prompt: str) -> list[int]:
        return [1] * (prompt.count(" ") + 1)


class Instant:
    """An engine whose steps take ``pause`` seconds and serve every running request at once.

    With no pause each request goes on by itself, one chunk in a turn of the event loop.
    """

    tokenizer, renderer, alive = Words(), Turns(), True
    assets = FrontendAssets(tokenizer, renderer, guarded_tokenizer=tokenizer)

    def __init__(self, pause: float) -> None:
        self.config: EngineConfig = from_options(model="instant", tool_call_parser="hermes")
        self.plugins = PluginManager()
        self.texts = TextPool(10.0, 1000)
        self.parser_watchdog = parser_watchdog(self.plugins.call_stats)
        self.info = EngineInfo(
            model="instant",
            architecture="Instant",
            dtype="none",
            device="none",
            vocab_size=1000,
            max_model_len=100_000,
            page_size=16,
            kv_cache_groups=[],
            num_async_steps=0,
            eos_token_ids=[0],
        )
        self._pause = pause
        self._step = asyncio.Event()

    async def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        due = time.monotonic()
        while self._pause:
            due += self._pause  # an engine is another process: it does not wait for the server
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._step.set()
            self._step = asyncio.Event()

    async def shutdown(self) -> None:
        self._ticker.cancel()

    async def stats(self, timeout: float) -> EngineStats:
        return EngineStats()

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        count = sampling_params.max_tokens or 1
        if sampling_params.output_kind != "delta":
            yield self._output("word " * count, [7] * count, "stop")
            return
        for i in range(count):
            await (self._step.wait() if self._pause else asyncio.sleep(0))
            yield self._output("word ", [7], "stop" if i == count - 1 else None)

    @staticmethod
    def _output(text: str, ids: list[int], reason: str | None) -> RequestOutput:
        completion = CompletionOutput(index=0, text=text, token_ids=ids, finish_reason=reason)
        return RequestOutput(
            request_id="",
            prompt=None,
            prompt_token_ids=[1, 2],
            outputs=[completion],
            finished=bool(reason),
        )


@dataclass
class Scenario:
    """``streams`` clients send ``requests`` requests each, with ``body`` to ``path``."""

    path: str
    body: dict[str, Any]
    streams: int
    requests: int
    units: int
    """Chunks of an answer; 0 if whole answers are counted."""
    pause: float = 0.0
    raw: bool = False
    """Serve bytes made before from a bare ASGI function: what uvicorn and the machine take."""


MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCENARIOS = {
    "bare": Scenario("/", {}, 16, 300, 0, raw=True),
    "bare-stream": Scenario("/", {"stream": True}, 64, 3, CHUNKS, raw=True),
    "bare-stream-paced": Scenario("/", {"stream": True}, 64, 1, CHUNKS, 0.02, raw=True),
    "health": Scenario("/health", {}, 16, 400, 0),
    "chat": Scenario(CHAT, {"messages": MESSAGES, "max_tokens": 16}, 16, 300, 0),
    "completion": Scenario(TEXT, {"prompt": "a b c", "max_tokens": 16}, 16, 300, 0),
    "chat-stream": Scenario(
        CHAT, {"messages": MESSAGES, "max_tokens": CHUNKS, "stream": True}, 64, 3, CHUNKS
    ),
    "completion-stream": Scenario(
        TEXT, {"prompt": "a", "max_tokens": CHUNKS, "stream": True}, 64, 3, CHUNKS
    ),
    "chat-stream-256": Scenario(
        CHAT, {"messages": MESSAGES, "max_tokens": CHUNKS, "stream": True}, 256, 2, CHUNKS
    ),
    "chat-stream-paced": Scenario(
        CHAT, {"messages": MESSAGES, "max_tokens": CHUNKS, "stream": True}, 64, 1, CHUNKS, 0.02
    ),
    "tools-stream": Scenario(
        CHAT,
        {"messages": MESSAGES, "tools": TOOLS, "max_tokens": CHUNKS, "stream": True},
        64,
        3,
        CHUNKS,
    ),
    "tools-stream-paced": Scenario(
        CHAT,
        {"messages": MESSAGES, "tools": TOOLS, "max_tokens": CHUNKS, "stream": True},
        64,
        1,
        CHUNKS,
        0.02,
    ),
}


def serve(port: int, pause: float) -> None:
    from treadle_server.config import server_from_options
    from treadle_server.run import serve_engine

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of this process
    build: Callable[[], Any] = lambda: Instant(pause)  # noqa: E731
    serve_engine(build, server_from_options(port=port, log_level="error"))


def serve_bare(port: int, pause: float) -> None:
    import uvicorn

    chunk = b'data: {"id":"chatcmpl","object":"chat.completion.chunk","choices":[]}' + b" " * 120

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        stream = b"stream" in (await receive())["body"]
        headers = [] if stream else [(b"content-length", b"%d" % len(chunk))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(CHUNKS if stream else 0):
            await asyncio.sleep(pause)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if stream else chunk})

    uvicorn.run(app, port=port, log_level="error", loop="uvloop", http="httptools", lifespan="off")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def client(port: int, scenario: Scenario, gaps: list[float]) -> None:
    """One kept connection that asks and reads to the end of each answer. The seconds between the
    chunks of a paced answer are added to ``gaps``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(scenario.body).encode()
    request = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (
        scenario.path.encode(),
        len(body),
        body,
    )
    for _ in range(scenario.requests):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head[:20]:
            raise RuntimeError(head.decode())
        if scenario.pause:
            times = [time.perf_counter() async for _ in chunks(reader)]
            gaps += (after - before for before, after in pairwise(times[1:-2]))
        elif scenario.units:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
    writer.close()


async def chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """The chunks of one answer, as they arrive."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size + 2)
    await reader.readexactly(2)


async def load(port: int, scenario: Scenario) -> list[float]:
    """All clients at once; returns the gaps between chunks of paced answers in seconds."""
    gaps: list[float] = []
    await asyncio.gather(*(client(port, scenario, gaps) for _ in range(scenario.streams)))
    return gaps


def measure(name: str, scenario: Scenario, rounds: int) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(
        target=serve_bare if scenario.raw else serve, args=(port, scenario.pause), daemon=True
    )
    process.start()
    try:
        wait_for(port)
        asyncio.run(load(port, scenario))  # warm
        best_s, wall = float("inf"), 0.0
        gaps: list[float] = []
        count = scenario.streams * scenario.requests * max(1, scenario.units)
        for _ in range(rounds):
            cpu, start = cpu_seconds(process.pid or 0), time.perf_counter()
            gaps += asyncio.run(load(port, scenario))
            cpu_per_unit = (cpu_seconds(process.pid or 0) - cpu) / count
            if cpu_per_unit < best_s:
                best_s, wall = cpu_per_unit, time.perf_counter() - start
    finally:
        process.terminate()
        process.join(10)
        process.kill()
    percentiles = statistics.quantiles(gaps, n=100) if gaps else []
    return {
        "scenario": name,
        "unit": "chunk" if scenario.units else "request",
        "cpu_us": round(best_s * 1e6, 2),
        "per_core_per_s": round(1 / best_s) if best_s else None,
        "wall_per_s": round(count / wall) if wall else None,
        **{f"gap_p{p}_ms": round(percentiles[p - 1] * 1e3, 2) for p in (50, 99) if gaps},
    }


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []], help=", ".join(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many is reported")
    arguments = parser.parse_args()
    for name in arguments.scenario or SCENARIOS:
        print(json.dumps(measure(name, SCENARIOS[name], arguments.rounds)), flush=True)


if __name__ == "__main__":
    main()
