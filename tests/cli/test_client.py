"""The client of other servers: addresses, pieces that end anywhere, and servers that misbehave."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fake_server import fake_server

from treadle.errors import (
    ConfigError,
    EngineError,
    ModelNotFoundError,
    QueueFullError,
    RequestError,
)
from treadle_cli.client import Address, EventReader, Server, error_of


@pytest.mark.parametrize(
    ("url", "shown", "authority"),
    [
        ("http://h:8000", "http://h:8000/v1", "h:8000"),
        ("localhost:8000", "http://localhost:8000/v1", "localhost:8000"),
        ("https://api.x.com/v1/", "https://api.x.com/v1", "api.x.com"),
        ("https://x.com/v1beta/openai", "https://x.com/v1beta/openai", "x.com"),
        ("http://[::1]:80/llm", "http://[::1]/llm/v1", "[::1]"),
        ("unix:/run/t.sock", "unix:/run/t.sock", "localhost"),
    ],
)
def test_addresses(url, shown, authority):
    address = Address.parse(url)
    assert (str(address), address.authority) == (shown, authority)


@pytest.mark.parametrize(
    "url", ["", "ftp://h", "http://", "http://h:99999", "http://h/a b", "http://h?x=1", "unix:",
            "http://h/\r\nX: y", "http://a@h"]
)  # fmt: skip
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match="URL"):
        Address.parse(url)


STREAM = (
    ': hello\r\n\r\nevent: x\ndata: {"choices":[{"delta":{"content":"日本"}}]}\n\n'
    'data:{"choices":[{"delta":{"reasoning":"r"}}],"new":1}\r\n\r\n'
    'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
).encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_end_anywhere(size):
    reader = EventReader()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    events = [event for piece in pieces for event in reader.feed(piece)]
    assert [c.delta.content or c.delta.thought for e in events for c in e.choices] == ["日本", "r"]
    assert events[-1].usage.completion_tokens == 2 and reader.is_done


@pytest.mark.parametrize(
    "line", [b"data: {\n", b"data: []\n", b'data: {"choices": 3}\n', b"data: \xff\n"]
)
def test_an_event_that_is_not_openais(line):
    with pytest.raises(EngineError, match="the server sent an event that is not OpenAI's"):
        list(EventReader().feed(line))


@pytest.mark.parametrize(
    ("status", "content", "kind", "message"),
    [
        (400, b'{"error": {"message": "bad"}}', RequestError, "answered 400: bad"),
        (422, b'{"detail": "no"}', RequestError, "answered 422: no"),
        (401, b"", RequestError, "give a key with --api-key"),
        (404, b'{"error": "no model"}', ModelNotFoundError, "answered 404: no model"),
        (404, b"", ModelNotFoundError, "is the URL that of an OpenAI-compatible server"),
        (429, b"{}", QueueFullError, "answered 429"),
        (503, b"<html>", EngineError, "answered 503: <html>"),
        (302, b"", EngineError, "answered 302"),
    ],
)
def test_errors_of_a_server(status, content, kind, message):
    error = error_of(status, content, "http://h/v1/x")
    assert type(error) is kind and message in str(error)


async def texts(server: Server) -> list[str]:
    stream = server.stream("/chat/completions", {})
    return [c.delta.content for _, event in [e async for e in stream] for c in event.choices]


@pytest.mark.parametrize("chunked", [True, False])
async def test_one_connection_serves_many_requests(chunked):
    """With an answer that only the end of the connection ends, each request has its own."""
    with fake_server() as fake:
        fake.chunked, fake.answers = chunked, [[{"content": "a"}, {"content": "b"}]]
        server = Server(fake.url)
        for _ in range(3):
            assert await texts(server) == ["a", "b"]
        assert await server.models() == ["tiny", "other"]
        server.close()


async def test_an_answer_that_nobody_reads_to_its_end_is_left():
    with fake_server() as fake:
        fake.answers = [[{"content": "a"}, threading.Event()]]
        server = Server(fake.url)
        stream = server.stream("/chat/completions", {})
        await anext(stream)
        await stream.aclose()
        assert await asyncio.to_thread(fake.left.wait, 60)


RAW = {
    b"": "closed the connection without an answer",
    b"SSH-2.0-x\r\n": "does not speak HTTP/1.1",
    b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ndata: {}": "in the middle of an answer",
    b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\ndata: {}\n\n": "ended an answer in the middle",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n": "does not speak HTTP/1.1",
}


@pytest.mark.parametrize("content", RAW)
async def test_servers_that_misbehave(content):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(content)
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    with pytest.raises(EngineError, match=RAW[content]):
        await texts(server)
    listener.close()
    await listener.wait_closed()


async def test_a_connection_that_the_server_closed_meanwhile_costs_nothing():
    """An idle connection ends between two requests; the second one uses a new connection."""
    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"data": [{"id": "m"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()
        closed.set()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    for _ in range(3):
        assert await server.models() == ["m"]
        await closed.wait()
        closed.clear()
    server.close()
    listener.close()
    await listener.wait_closed()
