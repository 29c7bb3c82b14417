"""What a connection may send, and for how long it may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from serving import Server, serving, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


async def refused(server: Server, head: bytes) -> bytes:
    """Send a head that is too large; the answer, or nothing if the server hung up first."""
    try:
        return await server.raw(head)
    except (ConnectionError, BrokenPipeError):
        return b""


@pytest.mark.parametrize("size", [65_000, 70_000, 400_000, 5_000_000])
async def test_a_large_header_is_refused(size: int) -> None:
    async with serving() as server:
        answer = await refused(
            server, HEAD + b"x: " + b"a" * size + b"\r\nconnection: close\r\n\r\n"
        )
        assert (b"431" in answer[:20]) == (size > 65_536) or (not answer and size > 1_000_000), (
            answer[:300]
        )
        assert (await server.client.get("/health")).status_code == 200


async def test_many_headers_and_a_long_path_are_refused() -> None:
    async with serving() as server:
        many = await refused(
            server, HEAD + b"".join(b"x%d: 1\r\n" % i for i in range(200)) + b"\r\n"
        )
        long = await refused(
            server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
        )
        garbage = await refused(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    assert b" 431 " in many[:20] and b"headers_too_large" in many
    assert b" 431 " in long[:20]
    assert b" 400 " in garbage[:20] and b"invalid_request_error" in garbage


@pytest.mark.parametrize("announced", [True, False])
async def test_a_large_body_is_refused_as_it_comes(announced: bool) -> None:
    async def pieces() -> object:
        for _ in range(100):
            yield b" " * 50_000

    async with serving(max_body_bytes=100_000) as server:
        fits = await server.post("/v1/completions", b" " * 90_000 + b'{"prompt":"a"}')
        assert fits.status_code == 200
        content = b" " * 100_001 if announced else pieces()
        response = await server.client.post("/v1/completions", content=content)  # type: ignore[arg-type]
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


async def test_slow_senders_are_dropped_and_others_served() -> None:
    async with serving(header_timeout=0.3, body_timeout=0.3) as server:
        half = [
            b"",
            b"GET /health HT",
            HEAD + b"content-le",
            HEAD + b"content-length: 100\r\n\r\n{",
        ]
        slow = [asyncio.create_task(server.raw(data)) for data in half * 25]
        await asyncio.sleep(0.05)
        assert (await server.complete()).status_code == 200
        done, pending = await asyncio.wait(slow, timeout=20)
        assert not pending
        for task in done:
            assert task.exception() is None or isinstance(task.exception(), ConnectionError)
        await until(lambda: server.context.metrics.active == 0)


async def test_a_body_that_drips_is_cut_off() -> None:
    """No pause in it is long, but it would never end."""

    async def drops() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.05)
            yield b" "

    async with serving(body_timeout=0.2) as server:
        with pytest.raises(httpx.HTTPError):
            await asyncio.wait_for(server.client.post("/v1/completions", content=drops()), 30)
        assert (await server.complete()).status_code == 200
        await until(lambda: server.context.metrics.active == 0)


async def test_a_kept_connection_may_be_idle_longer_than_a_header() -> None:
    async with serving(header_timeout=0.3, timeout_keep_alive=5) as server:
        for _ in range(3):
            assert (await server.complete()).status_code == 200
            await asyncio.sleep(0.5)
        assert server.context.metrics.active == 0


async def test_compressed_bodies_are_refused() -> None:
    async with serving() as server:
        response = await server.post("/v1/completions", b"x", headers={"content-encoding": "gzip"})
    assert response.status_code == 415


@pytest.mark.parametrize(
    "body", [b"{" + b'"a":[' * 1000, b"[" * 1_000_000, b'{"messages":' + b"[{" * 40_000]
)
async def test_deep_json_is_a_client_error_on_every_route(body: bytes) -> None:
    async with serving() as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = await server.post(path, body)
            assert response.status_code == 400, path
            assert response.json()["error"]["code"] == "json_too_deep"


async def test_pipelined_requests_are_answered_in_order() -> None:
    template = b"GET /version HTTP/1.1\r\nhost: localhost\r\nx-request-id: %s\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with serving() as server:
        answer = await server.raw(template % b"a" + template % b"b" + last)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b"x-request-id: a") < answer.index(b"x-request-id: b")
