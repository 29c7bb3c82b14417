"""The client of an engine process: start it, exchange messages, detect its exit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import subprocess
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import msgspec

from treadle.api.requests import EngineRequest, TokenOutput
from treadle.api.stats import EngineStats
from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig
from treadle.engine.ipc import (
    AbortRequests,
    AddRequests,
    Command,
    EngineFailed,
    EngineReady,
    Ping,
    Pong,
    Report,
    RequestRejected,
    StartEngine,
    StepOutputs,
    StopEngine,
    decode_report,
    encode_request,
)
from treadle.errors import EngineDeadError, TreadleError
from treadle.processes.framing import FrameDecoder, encode_frame
from treadle.processes.spawn import exit_reason, spawn

__all__ = ("EngineClient", "EngineObserver")

log = logging.getLogger("treadle.engine")

EXIT_SECONDS = 10.0
BUFFER = 4 * 2**20
FRAME_BYTES = 4 * 2**20


class EngineObserver(Protocol):
    """Receives the engine's events. All methods are called in the event loop's thread."""

    def on_outputs(self, outputs: list[TokenOutput]) -> None: ...
    def on_rejected(self, id: str, error: TreadleError) -> None: ...

    def on_engine_dead(self, error: EngineDeadError) -> None:
        """Handle the end of the engine. Called once, as the last event."""


class EngineClient(asyncio.Protocol):
    """An engine process and the connection to it. Use it from one event loop only."""

    def __init__(
        self, listener: EngineObserver, entry: str = "treadle.engine.process:main"
    ) -> None:
        """``entry`` is the function that the child runs, as ``module:function``."""
        self._observer = listener
        self._entry = entry
        self._child: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._frames = FrameDecoder()
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._pings: dict[int, asyncio.Future[EngineStats]] = {}
        self._numbers = itertools.count(1)
        self._requests_to_add: list[msgspec.Raw] = []
        self._ids_to_abort: list[str] = []
        self._flushing = False
        self._closing = False
        self._reported_error: TreadleError | None = None
        self.fatal_error: EngineDeadError | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self, config: EngineConfig) -> EngineInfo:
        """Start the process and wait until the model is loaded.

        Raises the engine's error (``CheckpointError``, ``ConfigError``, …), or ``EngineDeadError``
        if the process ends without reporting one. The process is ended on failure or cancellation.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._child, sock = spawn(self._entry, buffer_bytes=BUFFER)
        try:
            await loop.create_unix_connection(lambda: self, sock=sock)
            self._send(StartEngine(config))
            return await self._ready
        except BaseException:
            if self._transport is None:
                sock.close()
            await self.stop(seconds=0.0)
            raise

    async def stop(self, seconds: float = EXIT_SECONDS) -> None:
        """Stop the process; kill it if it still runs after ``seconds``. May be called twice."""
        self._closing = True
        if self._transport is not None and not self._transport.is_closing():
            if self.fatal_error is None:
                self._send(StopEngine())
            self._transport.close()
        child = self._child
        if child is not None and not await _exited(child, seconds):
            if seconds:
                log.warning("the engine process %d did not end; killing it", child.pid)
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await _exited(child, EXIT_SECONDS)
        self._fail("it was shut down")

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests. All those of one iteration of the event loop are sent together.

        Raises ``RequestError`` if one cannot be sent. Then none of them is queued.
        """
        self.check()
        self._requests_to_add += [encode_request(request) for request in requests]
        self._schedule_flush()

    def abort(self, ids: Sequence[str]) -> None:
        """Queue aborts for sending. Does nothing if the engine is dead."""
        if ids and self.fatal_error is None:
            self._ids_to_abort += ids
            self._schedule_flush()

    async def ping(self, timeout: float) -> EngineStats:
        """Return the engine's statistics. Raises ``EngineDeadError`` after ``timeout`` seconds."""
        self.check()
        number = next(self._numbers)
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._pings[number] = answer
        try:
            self._send(Ping(number))
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise EngineDeadError(
                f"the engine hangs: it has not answered for {timeout:g} s"
            ) from None
        finally:
            self._pings.pop(number, None)

    def check(self) -> None:
        """Raise ``EngineDeadError`` if the engine has stopped or was not started."""
        if self.fatal_error is not None:
            raise EngineDeadError(str(self.fatal_error)) from self.fatal_error.__cause__
        if self._transport is None:
            raise EngineDeadError("the engine was not started; call start() first")

    def _schedule_flush(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        requests, self._requests_to_add = self._requests_to_add, []
        request_ids, self._ids_to_abort = self._ids_to_abort, []
        if self.fatal_error is not None:
            return
        try:
            for part in _batches(requests):
                self._send(AddRequests(part))
            if request_ids:
                self._send(AbortRequests(request_ids))
        except Exception as error:
            # Which of the commands are lost is unknown. End the engine rather than let their
            # requests wait for ever.
            log.exception("commands could not be sent to the engine process")
            self._break(f"a command could not be sent to it: {error}", error)

    def _send(self, command: Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(command))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._handle_event(decode_report(payload))
        except Exception as error:
            # After an invalid message the stream cannot be trusted: ignore the rest of it.
            log.exception("the engine process sent an invalid message")
            self._break("it sent an invalid message", error)

    def _break(self, reason: str, cause: BaseException) -> None:
        """Fail, close the connection and kill the process."""
        self._fail(reason, cause)
        if self._transport is not None:
            self._transport.close()
        if self._child is not None:
            self._child.kill()

    def _handle_event(self, report: Report) -> None:
        match report:
            case StepOutputs(outputs):
                self._observer.on_outputs(outputs)
            case RequestRejected(id, failure):
                self._observer.on_rejected(id, failure.error())
            case Pong(number, stats):
                answer = self._pings.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(stats)
            case EngineReady(info):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case EngineFailed(failure):
                self._reported_error = failure.error()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing:
            return
        if self._reported_error is not None:
            self._fail(str(self._reported_error), self._reported_error)
        else:
            self._fail(_exit_reason(self._child), exc)

    def _fail(self, reason: str, cause: BaseException | None = None) -> None:
        if self.fatal_error is not None:
            return
        self.fatal_error = EngineDeadError(f"the engine has stopped: {reason}")
        self.fatal_error.__cause__ = cause
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._reported_error or self.fatal_error)
        elif not self._closing:
            # A server does not report the reason to its clients, so log it for the operator.
            log.error("%s", self.fatal_error)
        for answer in self._pings.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(str(self.fatal_error)))
        self._observer.on_engine_dead(self.fatal_error)


def _batches(requests: list[msgspec.Raw]) -> Iterator[list[msgspec.Raw]]:
    """Split encoded requests into lists of at most ``FRAME_BYTES``, or one request."""
    part: list[msgspec.Raw] = []
    size = 0
    for request in requests:
        length = len(memoryview(request))
        if part and size + length > FRAME_BYTES:
            yield part
            part, size = [], 0
        part.append(request)
        size += length
    if part:
        yield part


def _exit_reason(child: subprocess.Popen[bytes] | None) -> str:
    """Return how the process ended. Its socket is closed, so wait shortly for its exit."""
    if child is None:
        return "it was never started"
    try:
        status = child.wait(0.2)
    except subprocess.TimeoutExpired:
        return "its process closed the connection"
    return f"its process {exit_reason(status)}; see its log above"


async def _exited(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether ``child`` exits within ``seconds``. Polls, as this takes milliseconds."""
    pause = 0.002
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while child.poll() is None:
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.1)
    return child.poll() is not None
