"""The process of an isolated server plugin: the plugin's application, which answers what it is sent.

A thread reads the socket, so that questions to the tokenizer are answered while the event loop waits
for them. Answers are held back while the server has not passed on what it got.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import uvloop
from litestar import Litestar
from litestar.concurrency import set_asyncio_executor

from treadle.api.kinds import CORE_KINDS
from treadle.config import PluginConfig
from treadle.errors import PluginLoadError, TreadleError
from treadle.plugins import Entry, PluginManager
from treadle.processes.failure import Failure, printable
from treadle.processes.framing import encode_frame, receive_frame
from treadle.processes.isolated import ignore_interrupts, limit_memory
from treadle.processes.lifeline import end_with_parent
from treadle_server.hookspecs import SERVER
from treadle_server.isolation.route_app import FAILURE, build, to_refusal
from treadle_server.isolation.route_engine import Engine, current_request
from treadle_server.isolation.route_wire import (
    PIECE_BYTES,
    WINDOW_BYTES,
    Ack,
    BeginRequest,
    Cancel,
    EndOfAnswer,
    Head,
    Output,
    Piece,
    Ping,
    PluginLoaded,
    Pong,
    Raised,
    Refusal,
    Routes,
    Scope,
    Start,
    StartFailed,
    Told,
    child_decoder,
)
from treadle_server.isolation.route_wire import Ask as AskTokenizer
from treadle_server.isolation.wire import Hello
from treadle_server.plugin_faults import root_cause

__all__ = ("main",)

MAX_THREADS = 8
"""Handlers that are not coroutines run in these; each reserves memory of the process."""
EXIT_SECONDS = 2.0
"""How long the plugin may take to end what it has opened, once the server has closed the socket."""


def main(fd: int) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    ignore_interrupts()
    end_with_parent(fd, grace=EXIT_SECONDS)
    sock = socket.socket(fileno=fd)
    link = ServerLink(sock)
    try:
        hello = msgspec.msgpack.decode(receive_frame(sock), type=Hello)
        limit_memory(hello.memory)
        entry = Entry(
            hello.kind, hello.key, hello.target, hello.dist, hello.version, file=hello.file
        )
        try:
            plugins = load(entry)
            link.send(PluginLoaded())
            start = msgspec.msgpack.decode(receive_frame(sock), type=Start)
            set_asyncio_executor(ThreadPoolExecutor(MAX_THREADS))
            uvloop.run(serve(link, plugins, entry, start))
        except ConnectionError:
            raise
        except BaseException as error:  # also what ends a process: the server says it in its words
            link.send(StartFailed(_failure(entry, error)))
    except ConnectionError:
        pass
    os._exit(0)  # threads of the plugin do not keep the process


def load(entry: Entry) -> PluginManager:
    """Import the plugin. Raises ``PluginLoadError``."""
    kinds = {kind.name: kind for kind in (*CORE_KINDS, SERVER)}
    plugins = PluginManager(PluginConfig(), source=lambda: (), kinds=kinds)
    plugins.entries.append(entry)
    plugins.loader.load(entry)
    return plugins


def _failure(entry: Entry, error: BaseException) -> Failure:
    error = root_cause(error)
    if isinstance(error, TreadleError):
        return Failure.of(error)
    return Failure.of(
        PluginLoadError(printable(f"{entry.id} from {entry.owner}: {entry.error_text(error)}"))
    )


class ServerLink:
    """The socket to the server. ``send`` and ``ask`` are safe in threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._questions: dict[int, queue.SimpleQueue[bytes]] = {}
        self._numbers = itertools.count(1)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises ``ConnectionError`` if the server is gone."""
        frame = encode_frame(message)
        with self._lock:
            self._sock.sendall(frame)

    def receive(self) -> bytes:
        """Return the next message of the server, which one thread reads."""
        return receive_frame(self._sock)

    def ask(self, call: bytes) -> bytes:
        """Return the reply of the server's tokenizer."""
        number, replies = next(self._numbers), queue.SimpleQueue[bytes]()
        self._questions[number] = replies
        try:
            self.send(AskTokenizer(number, call))
            return replies.get()
        finally:
            del self._questions[number]

    def on_told(self, told: Told) -> None:
        """Pass on a reply of the tokenizer."""
        if (replies := self._questions.get(told.question)) is not None:
            replies.put(told.reply)


async def serve(link: ServerLink, plugins: PluginManager, entry: Entry, start: Start) -> None:
    """Let the plugin edit its application, and answer requests until the server closes the socket.

    Raises what the plugin raises before the first request.
    """
    loop = asyncio.get_running_loop()
    engine = Engine(link, start)
    requests, end = Requests(link, engine), loop.create_future()
    arguments = (link, requests, loop, end)
    threading.Thread(target=_read, args=arguments, name="treadle-link", daemon=True).start()
    known = {entry.id: start.options}
    plugins.config = msgspec.structs.replace(plugins.config, plugin_options=known)
    options = plugins.options_of(entry, entry.key)

    def edit(app: Any) -> None:
        plugins.hooks(entry, wrapped=False).treadle_server(app=app, engine=engine, options=options)

    app, routes = build(engine, start, entry.id, edit)
    requests.app, requests.entry = app, entry
    async with app.lifespan():
        link.send(Routes(routes))
        await end


def _read(
    link: ServerLink, requests: Requests, loop: asyncio.AbstractEventLoop, end: asyncio.Future[None]
) -> None:
    decoder = child_decoder()
    try:
        while True:
            message = decoder.decode(link.receive())
            if isinstance(message, Told):
                link.on_told(message)
            else:
                loop.call_soon_threadsafe(requests.on_message, message)
    except OSError:
        pass
    with contextlib.suppress(RuntimeError):  # the loop has ended before the socket
        loop.call_soon_threadsafe(end.set_result, None)


class Requests:
    """The requests that are being answered, by number. Used on the event loop only."""

    app: Litestar
    entry: Entry

    def __init__(self, link: ServerLink, engine: Engine) -> None:
        self._link, self._engine = link, engine
        self._running: dict[int, Running] = {}

    def on_message(self, message: Any) -> None:
        """Take a message of the server."""
        match message:
            case BeginRequest():
                running = Running(self._link, message)
                self._running[message.request] = running
                running.task = asyncio.create_task(self._answer(running))
            case Output():
                self._engine.on_output(message)
            case Ack():
                if (found := self._running.get(message.request)) is not None:
                    found.acknowledge(message.size)
            case Cancel():
                if (found := self._running.get(message.request)) is not None:
                    found.cancel()
            case Ping():
                self._link.send(Pong(message.number))

    async def _answer(self, running: Running) -> None:
        current_request.set(running.number)
        try:
            await self.app(running.scope, running.receive, running.send)  # type: ignore[arg-type]
            if not running.is_complete and running.failure is None:
                raise RuntimeError("its answer has no end")
        except BaseException as error:  # a plugin may raise anything
            running.failure = running.failure or error
        finally:
            del self._running[running.number]
            self._end(running)

    def _end(self, running: Running) -> None:
        failure = running.failure
        if failure is not None and not running.is_cancelled:
            known = to_refusal(failure)
            if known is None or running.has_head:
                text = printable(self.entry.error_text(failure))
                self._link.send(Raised(running.number, text))
            else:
                detail = known.detail
                words = (detail.message, detail.type, detail.param, detail.code)
                self._link.send(Refusal(running.number, known.status, *words, known.headers))
        self._link.send(EndOfAnswer(running.number, running.is_complete))


class Running:
    """One request, as an ASGI application sees it."""

    def __init__(self, link: ServerLink, begin: BeginRequest) -> None:
        self._link, self._body = link, begin.body
        self.number = begin.request
        self.scope = asgi_scope(begin.scope)
        self.task: asyncio.Task[None] | None = None
        self.has_head = self.is_complete = self.is_cancelled = False
        self.failure: BaseException | None = None
        self._is_read = False
        self._disconnected = asyncio.Event()
        self._num_unread = 0
        self._room = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        """Return the body, then the end of the connection."""
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """Pass an event of the answer on, once the server has room for it."""
        if (error := self.scope.get(FAILURE)) is not None:
            self.failure = error  # the answer to it is the server's
            return
        if message["type"] == "http.response.start":
            headers = [(bytes(k), bytes(v)) for k, v in message.get("headers", ())]
            self._link.send(Head(self.number, message["status"], headers))
            self.has_head = True
            return
        body = memoryview(message.get("body", b""))
        for begin in range(0, len(body), PIECE_BYTES):
            while self._num_unread >= WINDOW_BYTES:
                self._room.clear()
                await self._room.wait()
            piece = bytes(body[begin : begin + PIECE_BYTES])
            self._num_unread += len(piece)
            self._link.send(Piece(self.number, piece))
        if not message.get("more_body", False):
            self.is_complete = True
            self._disconnected.set()  # streams of litestar wait for it

    def acknowledge(self, size: int) -> None:
        """Take note that the client has got bytes."""
        self._num_unread -= size
        self._room.set()

    def cancel(self) -> None:
        """End the request: its client is gone."""
        self.is_cancelled = True
        self._disconnected.set()
        if self.task is not None:
            self.task.cancel()


def asgi_scope(scope: Scope) -> dict[str, Any]:
    """Return what an ASGI application is called with."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        **msgspec.structs.asdict(scope),
        "state": {"request_id": scope.request_id},
    }
