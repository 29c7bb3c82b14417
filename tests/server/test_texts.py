"""Rendering and tokenizing beside the event loop: bounded, fair, and only for clients that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import Server, serving, until

from treadle.text.text_pool import NUM_THREADS, TextPool
from treadle_server.testing.engine import CharacterTokenizer, FakeRenderer

SLOW: Any = [{"role": "user", "content": "wait"}]


class GatedRenderer(FakeRenderer):
    """Waits for a gate if a message says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waiting = 0

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if messages[0]["content"] == "wait":
            self.waiting += 1
            assert self.gate.wait(30), "nothing ran beside the template"
        return super().render(messages, **options)


class CountingTokenizer(CharacterTokenizer):
    calls = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.calls += 1
        return super().encode(text, add_special_tokens=add_special_tokens)


class RecordingPool(TextPool):
    """Remembers whose texts came."""

    def __init__(self) -> None:
        super().__init__(60.0, 100)
        self.clients: list[str] = []

    async def run(self, *arguments: Any, client: str = "", **options: Any) -> Any:
        self.clients.append(client)
        return await super().run(*arguments, client=client, **options)


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    renderer = engine.renderer = GatedRenderer()
    engine.texts = TextPool(60.0, 2)
    yield engine
    renderer.gate.set()


def slow_chats(server: Server, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(server.chat(messages=SLOW)) for _ in range(count)]


async def test_a_slow_template_holds_up_nobody(engine: ScriptedEngine) -> None:
    renderer: Any = engine.renderer
    async with serving(engine) as server:
        (slow,) = slow_chats(server, 1)
        await until(lambda: renderer.waiting)
        for _ in range(3):
            assert (await server.chat()).status_code == 200
            assert (await server.client.get("/health")).status_code == 200
        assert not slow.done()
        renderer.gate.set()
        assert (await slow).status_code == 200


async def test_texts_that_wait_are_bounded(engine: ScriptedEngine) -> None:
    renderer: Any = engine.renderer
    async with serving(engine) as server:
        slow = slow_chats(server, NUM_THREADS + 2)
        await until(lambda: len(engine.texts._pending) == 2)
        for path, body in (
            ("/v1/chat/completions", {"messages": SLOW}),
            ("/v1/chat/completions", {"messages": SLOW, "stream": True}),
            ("/tokenize", {"prompt": "x" * 2000}),
            ("/detokenize", {"tokens": [97] * 1000, "skip_special_tokens": True}),
        ):
            answer = await server.post(path, body)
            if path == "/detokenize":  # short: it needs no thread
                assert answer.status_code == 200
                continue
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
        renderer.gate.set()
        assert [(await task).status_code for task in slow] == [200] * len(slow)


async def test_the_text_of_a_client_that_left_is_not_rendered(engine: ScriptedEngine) -> None:
    renderer: Any = engine.renderer
    async with serving(engine) as server:
        slow = slow_chats(server, NUM_THREADS + 1)
        await until(lambda: len(engine.texts._pending) == 1)
        for task in slow:
            task.cancel()
        await until(lambda: not engine.texts._pending)
        renderer.gate.set()
        assert (await server.chat()).status_code == 200
        assert renderer.waiting == NUM_THREADS


async def test_a_text_that_is_too_long_is_not_tokenized() -> None:
    engine = ScriptedEngine(max_model_len=100_000)
    tokenizer = engine.tokenizer = CountingTokenizer()
    limit = 16 * 100_000
    async with serving(engine) as server:
        for body in (
            {"prompt": "x" * (limit + 1)},
            {"messages": [{"role": "user", "content": "x" * limit}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * limit}]}]},
        ):
            answer = await server.post("/tokenize", body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == next(iter(body))
            assert f"at most {limit}" in error["message"]
        assert tokenizer.calls == 0
        counted = await server.post("/tokenize", {"prompt": "x" * limit})
        assert counted.json()["count"] == limit, (
            "longer than the context, which one may want to know"
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_who_has_a_key_is_one_client(path: str) -> None:
    engine = ScriptedEngine()
    pool = engine.texts = RecordingPool()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with serving(engine) as server:
        await server.post(path, body, headers={"authorization": "Bearer anything"})
    assert pool.clients == ["127.0.0.1"], "whoever needs no key may send any"
    pool.clients.clear()
    async with serving(engine, api_key=["a", "b"]) as server:
        for name in ("authorization", "x-api-key"):
            for key in "ab":
                value = f"Bearer {key}" if name == "authorization" else key
                assert (await server.post(path, body, headers={name: value})).status_code == 200
    first, second = (sha256(key.encode()).hexdigest() for key in "ab")
    assert pool.clients == [first, second, first, second], "however the key was sent"
