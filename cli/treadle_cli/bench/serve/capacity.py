"""How fast this client can read: a stream of the shortest events, from a socket of this machine.

The sender runs on the same event loop, so the true figure is higher.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

from treadle_cli.bench.serve.load import send
from treadle_cli.bench.serve.measure import Record
from treadle_cli.client import Server

__all__ = ("readable_tokens_per_second",)

STREAMS = 16
EVENTS = 500
EVENT = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"m",'
    b'"choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Source(asyncio.Protocol):
    """Answers whatever is asked with ``EVENTS`` events, each in a packet of its own."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None and not self._left:
            self._left = EVENTS
            self._transport.write(HEAD)
            self._next()

    def _next(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._left:
            self._left -= 1
            self._transport.write(chunk(EVENT))
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._transport.write(chunk(END) + b"0\r\n\r\n")


async def readable_tokens_per_second() -> float:
    """Read ``STREAMS`` streams at once and return the events per second."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(Source, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()[:2]
    server = Server(f"http://{host}:{port}")
    records = [Record() for _ in range(STREAMS)]
    start_time = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for record in records:
                group.create_task(send(server, "/completions", {}, record, start_time))
        seconds = time.perf_counter() - start_time
    finally:
        server.close()
        listener.close()
        await listener.wait_closed()
    return sum(record.output_tokens for record in records) / seconds
