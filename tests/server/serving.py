"""A server in the test's own event loop, on a free port, always stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from scripted import ScriptedEngine

from treadle.text.parser_plugins import PARSER_KINDS
from treadle_server.config import server_from_options
from treadle_server.context import ServerContext
from treadle_server.lifecycle import Lifecycle
from treadle_server.listen import bind
from treadle_server.signals import Signals


class Server:
    """A running server; ``client`` speaks to it."""

    def __init__(
        self, lifecycle: Lifecycle, context: ServerContext, signals: Signals, port: int
    ) -> None:
        self.lifecycle, self.context, self.signals, self.port = lifecycle, context, signals, port
        self.task = asyncio.create_task(lifecycle.run())
        self.url = f"http://127.0.0.1:{port}"
        # Reading the certificates of the machine would take longer than most tests.
        self.client = httpx.AsyncClient(base_url=self.url, timeout=30, verify=False)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self.client.post(path, content=content, **options)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "ab", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await self.post("/v1/chat/completions", {"messages": messages, **body})

    async def raw(self, data: bytes, *, wait: float = 5.0) -> bytes:
        """Send bytes as they are and return all that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(wait):
                return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def serving(engine: ScriptedEngine | None = None, **options: Any) -> AsyncIterator[Server]:
    """``options`` are those of the server, and the parsers of the engine."""
    engine = engine or ScriptedEngine()
    parsers = {name: options.pop(name) for name in tuple(options) if name in PARSER_KINDS}
    if parsers or isinstance(engine, ScriptedEngine):
        engine.use_parsers(**parsers)
    defaults = {"port": 0, "drain_timeout": 5.0, "enable_plugin_metrics": True}
    config = server_from_options({**defaults, **options})
    bound = bind(config)
    try:
        context = ServerContext(engine, config)
        signals = Signals()
        lifecycle = Lifecycle(context, bound, signals)
    except BaseException:
        bound.close()
        raise
    server = Server(lifecycle, context, signals, 0 if config.uds else bound.getsockname()[1])
    task = server.task
    try:
        await until(lambda: lifecycle.started or task.done())
        yield server
    finally:
        await server.client.aclose()
        signals.take(signal.SIGTERM)
        signals.take(signal.SIGTERM)
        await asyncio.wait((task,), timeout=10)
        bound.close()
        if not task.done():
            task.cancel()
            raise TimeoutError("the server did not stop")
        task.exception()


async def until(condition: Callable[[], Any], wait: float = 5.0) -> None:
    """Wait until ``condition`` holds; fails loudly if it never does."""
    async with asyncio.timeout(wait):
        while not condition():
            await asyncio.sleep(0.005)


def events(text: str) -> list[Any]:
    """The events of a stream, ``[DONE]`` included as a string."""
    payloads = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            payloads.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return payloads
