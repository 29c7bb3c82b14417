"""Clients that go away: what they ask for, at which moment they leave, and how."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ("Departure", "Ending", "Moment", "depart", "departures")

TOKENS = 1500
"""Tokens that a client asks for. It is gone long before, unless it stays to the end."""
SHORT = 12
"""Tokens of one that stays."""
PAUSE = 0.05
"""Most seconds that a client waits before it leaves for no reason."""
PATIENCE = 60.0
RESET = struct.pack("ii", 1, 0)
"""``SO_LINGER`` with a timeout of 0: closing resets the connection."""


class Moment(StrEnum):
    HEAD = "in the head of the request"
    BODY = "in the body of the request"
    SENT = "once the request is sent"
    PAUSE = "a moment later"
    FIRST = "after the first bytes of the answer"
    MIDDLE = "in mid-stream"
    UNREAD = "without reading"
    END = "at the end"


class Ending(StrEnum):
    CLOSE = "FIN"
    RESET = "RST"
    HALF = "FIN of one direction, then of both"


@dataclass(frozen=True)
class Departure:
    """One client."""

    method: str
    path: str
    body: bytes
    streams: bool
    moment: Moment
    ending: Ending
    pause: float
    events: int
    """Lines of the stream that it reads before it leaves in the middle."""
    content_type: str = "application/json"

    @property
    def tokens(self) -> int:
        """Tokens that are generated, about, if the server does not see that it has left."""
        is_whole = self.path in ROUTES and self.moment not in (Moment.HEAD, Moment.BODY, Moment.END)
        return TOKENS if is_whole else 0

    @property
    def name(self) -> str:
        return f"{self.path}{' streamed' if self.streams else ''}"


# -- what they ask for --------------------------------------------------------------------


def chat(choice: random.Random) -> dict[str, Any]:
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 3},
        {"tools": [{"type": "function", "function": {"name": "get_weather"}}]},
        {"tool_choice": "required", "tools": [function(choice)]},
        {"response_format": schema_format(choice)},
        {"chat_template_kwargs": {"enable_thinking": True}},
    )
    return {"messages": messages(choice), "ignore_eos": True, **choice.choice(extras)}


def completion(choice: random.Random) -> dict[str, Any]:
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"n": 2},
        {"echo": True, "logprobs": 2},
        {"prompt": [text(choice), text(choice)]},
        {"guided_regex": f"[a-z]{{200,{choice.randrange(201, 400)}}}"},
    )
    return {"prompt": text(choice), "ignore_eos": True, **choice.choice(extras)}


def response(choice: random.Random) -> dict[str, Any]:
    return {"input": text(choice), "ignore_eos": True, "store": choice.random() < 0.5}


def message(choice: random.Random) -> dict[str, Any]:
    return {"messages": messages(choice), "ignore_eos": True, "system": text(choice)}


def ollama_chat(choice: random.Random) -> dict[str, Any]:
    return {"messages": messages(choice)}


def ollama_generate(choice: random.Random) -> dict[str, Any]:
    return {"prompt": text(choice)}


ROUTES: Mapping[str, tuple[Callable[[random.Random], dict[str, Any]], str]] = {
    "/v1/chat/completions": (chat, "max_tokens"),
    "/v1/completions": (completion, "max_tokens"),
    "/v1/responses": (response, "max_output_tokens"),
    "/v1/messages": (message, "max_tokens"),
    "/api/chat": (ollama_chat, "options"),
    "/api/generate": (ollama_generate, "options"),
}
"""Every route that generates: what makes its body, and its field for the number of tokens."""
BATCHES = "/v1/batches"
FILES = "/v1/files"


def text(choice: random.Random) -> str:
    """Return a prompt, often with a beginning that others have too."""
    return "What is the capital of Italy? " * choice.choice((1, 1, 4, 12)) + str(
        choice.randrange(50)
    )


def messages(choice: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": text(choice)}]


def schema(choice: random.Random) -> dict[str, Any]:
    """Return a schema that is hardly ever compiled already."""
    names = [f"field_{choice.randrange(10**6)}" for _ in range(choice.choice((1, 3, 8)))]
    properties = {name: {"type": "string", "maxLength": 50} for name in names}
    return {"type": "object", "properties": properties, "required": names}


def schema_format(choice: random.Random) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(choice)}}


def function(choice: random.Random) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "run", "parameters": schema(choice)}}


def departures(seed: int, batch_file: str) -> Iterator[Departure]:
    """Yield clients for ever: first every route at every moment, then any.

    A batch reads the uploaded file ``batch_file``. The same seed yields the same clients.
    """
    choice = random.Random(seed)
    every = [
        (path, streams, moment)
        for path in ROUTES
        for streams in (True, False)
        for moment in Moment
        if streams or moment not in (Moment.FIRST, Moment.MIDDLE, Moment.UNREAD)
    ]
    every += [(path, False, moment) for path in (BATCHES, FILES) for moment in (Moment.BODY,) * 2]
    every += [(BATCHES, False, moment) for moment in (Moment.SENT, Moment.PAUSE, Moment.END)]
    choice.shuffle(every)
    yield from (departure(choice, *one, batch_file) for one in every)
    while True:
        yield departure(choice, *choice.choice(every), batch_file)


def departure(
    choice: random.Random, path: str, streams: bool, moment: Moment, batch_file: str
) -> Departure:
    content_type = "application/json"
    if path == FILES:
        content_type = "multipart/form-data; boundary=edge"
        data = form(b"x" * choice.choice((10, 100_000)))
    elif path == BATCHES:
        body = {"input_file_id": batch_file, "completion_window": "24h"}
        data = json.dumps({**body, "endpoint": "/v1/completions"}).encode()
    else:
        make, length = ROUTES[path]
        tokens = SHORT if moment is Moment.END else TOKENS
        sampling = {"temperature": choice.choice((0, 0.8, 2.0))}
        if length == "options":
            options = {"options": {"num_predict": tokens, "temperature": 2.0}}
        else:
            options = {length: tokens, **sampling}
        data = json.dumps({**make(choice), **options, "stream": streams}).encode()
    return Departure(
        "POST",
        path,
        data,
        streams,
        moment,
        choice.choice(list(Ending)),
        choice.uniform(0, PAUSE),
        choice.randrange(1, 60),
        content_type,
    )


def form(content: bytes) -> bytes:
    """Return a form that uploads ``content`` as the input of a batch."""
    purpose = b'--edge\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    name = b'content-disposition: form-data; name="file"; filename="a.jsonl"'
    return purpose + b"--edge\r\n" + name + b"\r\n\r\n" + content + b"\r\n--edge--\r\n"


# -- how they leave -----------------------------------------------------------------------


async def depart(host: str, port: int, client: Departure) -> bytes:
    """Be the client; returns what it has read. Raises ``TimeoutError`` if no answer comes."""
    async with asyncio.timeout(PATIENCE):
        with socket.socket() as connection:
            connection.setblocking(False)
            if client.moment is Moment.UNREAD:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
            try:
                read = await visit(connection, client)
                await leave(connection, client)
            except ConnectionError:
                # The server may close first: it has refused a body that is not read to its end.
                return b""
            return read


async def visit(connection: socket.socket, client: Departure) -> bytes:
    loop = asyncio.get_running_loop()
    head = (
        f"{client.method} {client.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: {client.content_type}\r\ncontent-length: {len(client.body)}\r\n\r\n"
    ).encode()
    if client.moment is Moment.HEAD:
        await loop.sock_sendall(connection, head[: len(head) // 2])
        return b""
    if client.moment is Moment.BODY:
        await loop.sock_sendall(connection, head + client.body[: len(client.body) // 2])
        return b""
    await loop.sock_sendall(connection, head + client.body)
    if client.moment is Moment.SENT:
        return b""
    if client.moment in (Moment.PAUSE, Moment.UNREAD):
        await asyncio.sleep(client.pause)
        return b""
    read = b""
    while data := await loop.sock_recv(connection, 4096):
        read += data
        if client.moment is Moment.FIRST:
            break
        if client.moment is Moment.MIDDLE and read.count(b"\n") > client.events + 10:
            break
    return read


async def leave(connection: socket.socket, client: Departure) -> None:
    if client.ending is Ending.RESET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    elif client.ending is Ending.HALF:
        connection.shutdown(socket.SHUT_WR)
        await asyncio.sleep(client.pause)
