"""The connection to the process of an isolated server plugin: many requests at a time, each with a limit.

It is lost as a whole: a process that hangs, ends, or sends what is not a message takes all requests that
it was answering along.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, cast

import msgspec

from treadle.errors import TreadleError
from treadle.processes.failure import Failure
from treadle.processes.framing import FrameDecoder, encode_frame
from treadle_server.engine import Engine
from treadle_server.isolation.route_process import RouteProcess, told
from treadle_server.isolation.route_wire import (
    PIECE_BYTES,
    WINDOW_BYTES,
    Abort,
    Ack,
    Ask,
    BeginRequest,
    Cancel,
    EndOfAnswer,
    Generate,
    Head,
    Output,
    Piece,
    Ping,
    Pong,
    Raised,
    Refusal,
    Scope,
    server_decoder,
)

__all__ = ("ANSWER_SECONDS", "MAX_REQUESTS", "Connection", "Late", "Lost", "Stream")

ANSWER_SECONDS = 30.0
"""How long a request may take until its answer begins, not counting the time in which the engine
generates for it; and how long it may go on without anybody who waits for it."""
HANG_SECONDS = 5.0
"""How long the event loop of the process may stand still, and a cancelled request may take to end."""
TICK_SECONDS = 1.0
MAX_REQUESTS = 256
"""Requests that one process answers at a time."""
MAX_UNREAD = WINDOW_BYTES + PIECE_BYTES


class Lost(Exception):
    """The process is gone, and the request with it."""


class Late(Exception):
    """The plugin has not begun its answer in time."""


class Stream:
    """The events of one answer, which end with ``EndOfAnswer`` or an exception."""

    def __init__(self, number: int, deadline: float) -> None:
        self.number = number
        self.events: asyncio.Queue[Head | Piece | Refusal | Raised | EndOfAnswer | Lost | Late] = (
            asyncio.Queue()
        )
        self.deadline: float | None = deadline
        """``None`` once the answer has begun."""
        self.is_left = False
        self.num_generations = 0
        self.num_unread = 0


class Connection(asyncio.Protocol):
    """The streams of one process. Used on the event loop that it was opened on.

    ``lost`` says why there is no process any more; ``on_lost`` is called once, unless it was closed.
    """

    def __init__(
        self, process: RouteProcess, engine: Engine, on_lost: Callable[[str], None]
    ) -> None:
        self.process = process
        self.lost = ""
        self._engine = engine
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._frames, self._decoder = FrameDecoder(), server_decoder()
        self._transport: asyncio.WriteTransport | None = None
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._generations: dict[int, tuple[asyncio.Task[None], Stream | None]] = {}
        self._questions: set[asyncio.Task[None]] = set()
        self._ping_time: float | None = None
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take over the socket of the process. Raises ``OSError``."""
        sock = self.process.sock
        sock.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=sock)
        self._watch = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Let the process end what it has opened, and end it."""
        if not self.lost:
            self.lost = "the server ends it"
            self._stop()
            self._fail_streams(self.lost)
        await asyncio.to_thread(self.process.end)

    def begin(self, scope: Scope, body: bytes) -> Stream:
        """Send a request. Raises ``Lost``, also if too many are being answered."""
        if self.lost:
            raise Lost(self.lost)
        if len(self._streams) >= MAX_REQUESTS:
            raise Lost(f"it is answering {MAX_REQUESTS} requests already")
        stream = Stream(next(self._numbers), self._loop.time() + ANSWER_SECONDS)
        self._send(BeginRequest(stream.number, scope, body))
        self._streams[stream.number] = stream
        return stream

    def leave(self, stream: Stream) -> None:
        """Cancel what is left of a request: nobody waits for it any more."""
        if stream.number in self._streams and not stream.is_left:
            stream.is_left = True
            stream.deadline = self._loop.time() + ANSWER_SECONDS
            self._end_generations(stream)
            self._send(Cancel(stream.number))

    def acknowledge(self, stream: Stream, size: int) -> None:
        """Tell that bytes of an answer have gone to the client."""
        stream.num_unread -= size
        self._send(Ack(stream.number, size))

    # -- asyncio ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._receive(self._decoder.decode(payload))
        except (TreadleError, msgspec.MsgspecError, ValueError) as error:
            self.lose(f"it sent what is not a message: {error}")

    def connection_lost(self, _: Exception | None) -> None:
        self.lose("")

    # -- what comes of the process ---------------------------------------------------

    def lose(self, reason: str) -> None:
        """End the process; ``reason`` says why, unless it has ended by itself."""
        if self.lost:
            return
        self.lost = reason or "it has ended"
        self._stop()
        end = self.process.kill if reason else self.process.exit_reason
        self._loop.run_in_executor(None, end).add_done_callback(
            lambda done: self._tell(reason or f"it {done.result()}")
        )

    def _tell(self, reason: str) -> None:
        """Count the loss first, so that whoever is told of it can see it counted."""
        self._on_lost(reason)
        self._fail_streams(reason)

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.close()
        for task, _ in [*self._generations.values()]:
            task.cancel()

    def _fail_streams(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.events.put_nowait(Lost(reason))
        self._streams.clear()

    def _receive(self, message: Any) -> None:
        match message:
            case Pong():
                self._ping_time = None
            case Ask():
                self._start(self._answer(message))
            case Generate():
                self._begin_generation(message)
            case Abort(number):
                if (found := self._generations.get(number)) is not None:
                    found[0].cancel()
            case Head() | Piece() | Refusal() | Raised() | EndOfAnswer():
                if (stream := self._streams.get(message.request)) is not None:
                    self._pass_on(stream, message)
            case _:
                raise ValueError(f"{type(message).__name__} after its start")

    def _pass_on(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Head) and not stream.is_left:
            stream.deadline = None
        elif isinstance(message, Piece):
            stream.num_unread += len(message.data)
            if stream.num_unread > MAX_UNREAD and not stream.is_left:
                raise ValueError(f"{stream.num_unread} bytes of an answer that nobody has read yet")
        elif isinstance(message, EndOfAnswer):
            del self._streams[stream.number]
            self._end_generations(stream)
        stream.events.put_nowait(message)

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _answer(self, question: Ask) -> None:
        try:
            tokenizer: Any = self._engine.tokenizer
        except TreadleError:
            tokenizer = None
        self._send(await asyncio.to_thread(told, question, tokenizer))

    # -- generations -----------------------------------------------------------------

    def _begin_generation(self, message: Generate) -> None:
        stream = self._streams.get(message.request)
        if message.generation in self._generations:
            raise ValueError(f"generation {message.generation} twice")
        if stream is not None:
            stream.num_generations += 1
        task = self._loop.create_task(self._generate(message))
        self._generations[message.generation] = task, stream
        task.add_done_callback(lambda _: self._generation_ended(message.generation))

    async def _generate(self, message: Generate) -> None:
        number = message.generation
        try:
            outputs = self._engine.generate(message.prompt, message.params)
            async with aclosing(outputs):
                async for output in outputs:
                    self._send(Output(number, output))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a prompt that is none is the plugin's to hear of
            self._send(Output(number, failure=Failure.of(error)))
        else:
            self._send(Output(number))

    def _generation_ended(self, number: int) -> None:
        _, stream = self._generations.pop(number)
        if stream is not None:
            stream.num_generations -= 1
            if stream.deadline is not None:
                stream.deadline = self._loop.time() + ANSWER_SECONDS

    def _end_generations(self, stream: Stream) -> None:
        for task, owner in [*self._generations.values()]:
            if owner is stream:
                task.cancel()

    # -- limits ----------------------------------------------------------------------

    async def _look(self) -> None:
        while not self.lost:
            await asyncio.sleep(TICK_SECONDS)
            self.check(self._loop.time())

    def check(self, now: float) -> None:
        """End what has taken too long at the time ``now``."""
        if self._ping_time is not None and now - self._ping_time > HANG_SECONDS:
            self.lose(f"its event loop has stood still for {HANG_SECONDS:g} s")
            return
        for stream in [*self._streams.values()]:
            if stream.deadline is None or stream.num_generations or now <= stream.deadline:
                continue
            if stream.is_left and now > stream.deadline + HANG_SECONDS:
                self.lose("a request that nobody waits for has not ended")
                return
            if not stream.is_left:
                stream.events.put_nowait(Late(f"has not begun to answer in {ANSWER_SECONDS:g} s"))
                self.leave(stream)
                stream.deadline = now  # it has had its time
        if self._streams and self._ping_time is None:
            self._ping_time = now
            self._send(Ping(0))

    def _send(self, message: msgspec.Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(OSError):
                self._transport.write(encode_frame(message))
