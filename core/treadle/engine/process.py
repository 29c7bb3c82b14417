"""The engine process: receive commands, run steps, send outputs.

It ends on ``StopEngine``, when the socket closes, when its parent exits, or when the engine fails. A
start or a step that does not return is cut off ``EXIT_SECONDS`` after the parent's end.
It ignores SIGINT and SIGTERM, which terminals and service managers send to every process at once:
the parent decides which requests to finish first.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from treadle.config import set_library_environment
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
    decode_command,
    decode_request,
    request_id,
)
from treadle.errors import EngineError, TreadleError
from treadle.processes.failure import Failure, printable
from treadle.processes.framing import FrameDecoder, encode_frame
from treadle.processes.lifeline import end_with_parent

if TYPE_CHECKING:
    from treadle.config import EngineConfig
    from treadle.engine.core import EngineCore

__all__ = ("Channel", "main", "serve")

log = logging.getLogger("treadle.engine")

IDLE_SECONDS = 2.0
# Minimum time between two checks of parent and workers, however many pings an idle engine gets.
CHECK_SECONDS = 1.0
# Enough to stop workers that hang, too.
EXIT_SECONDS = 15.0
RECEIVE = 256 * 1024
# Bytes that may wait for a parent that does not read, before steps wait for it too.
MAX_UNSENT_BYTES = 64 * 2**20


class ConnectionClosed(Exception):
    """The parent has closed the connection or has exited."""


class Channel:
    """The child's end of the socket. Reading and writing do not block a step."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameDecoder()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    def receive(self, timeout: float) -> list[Command]:
        """Return the commands received; wait up to ``timeout`` seconds for the first bytes.

        Raises ``ConnectionClosed`` at the end of the stream.
        """
        if timeout or self._unsent:
            events = self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0), timeout)
            if events & select.POLLOUT:
                self._flush()
            if not events & ~select.POLLOUT:  # POLLHUP is always reported
                return []
        commands: list[Command] = []
        while True:
            try:
                data = self._sock.recv(RECEIVE)
            except BlockingIOError:
                return commands
            except ConnectionError as error:
                raise ConnectionClosed from error
            if not data:
                raise ConnectionClosed
            commands += [decode_command(payload) for payload in self._frames.feed(data)]
            if len(data) < RECEIVE:
                return commands

    def send(self, *reports: Report) -> None:
        """Send, and keep for later what the socket does not accept. Raises ``ConnectionClosed``."""
        data = b"".join(map(encode_frame, reports))
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self._flush()
        while self._unsent_bytes > MAX_UNSENT_BYTES:  # the parent hangs: bound the memory
            self._wait(select.POLLOUT, IDLE_SECONDS)
            self._flush()

    def finish(self, seconds: float = 5.0) -> None:
        """Send the rest and close the socket. Give up after ``seconds`` without progress."""
        try:
            while self._unsent:
                if not self._wait(select.POLLOUT, seconds):
                    return
                self._flush()
        except ConnectionClosed:
            return
        finally:
            self._sock.close()

    def _wait(self, events: int, seconds: float) -> int:
        """Wait up to ``seconds`` and return the ready events, or 0."""
        # Not select(): the descriptor keeps its number in the parent, which may exceed 1023.
        poller = select.poll()
        poller.register(self._sock, events)
        ready = poller.poll(seconds * 1000)
        return ready[0][1] if ready else 0

    def _flush(self) -> None:
        while self._unsent:
            piece = self._unsent[0]
            try:
                num_sent = self._sock.send(piece)
            except BlockingIOError:
                return
            except (ConnectionError, BrokenPipeError) as error:
                raise ConnectionClosed from error
            self._unsent_bytes -= num_sent
            if num_sent == len(piece):
                self._unsent.popleft()
            else:
                self._unsent[0] = piece[num_sent:]


def serve(channel: Channel, create_core: Callable[[EngineConfig], EngineCore]) -> int:
    """Run an engine until it ends and return the exit status.

    ``create_core`` creates the engine core from the configuration in the first message.
    """
    core: EngineCore | None = None
    parent = os.getppid()
    try:
        start = _receive_start(channel, parent)
        core = create_core(start.config)
        channel.send(EngineReady(core.info))
        _loop(channel, core, parent)
    except ConnectionClosed:
        return 0
    except BaseException as error:  # the parent needs a report of any failure
        if not isinstance(error, TreadleError):
            log.exception("the engine failed")
        _report_failure(channel, EngineFailed(Failure.of(error)))
        return 1
    finally:
        if core is not None:
            core.close()
    return 0


def _receive_start(channel: Channel, parent: int) -> StartEngine:
    while True:
        for command in channel.receive(IDLE_SECONDS):
            if isinstance(command, StartEngine):
                return command
            raise EngineError(f"the first command was {type(command).__name__}, not Start")
        _check_parent(parent)


def _loop(channel: Channel, core: EngineCore, parent: int) -> None:
    check_time = time.monotonic()
    while True:
        has_work = core.has_work
        commands = channel.receive(0.0 if has_work else IDLE_SECONDS)
        for command in commands:
            if isinstance(command, StopEngine):
                return
            _handle_command(channel, core, command)
        if core.has_work:
            if outputs := core.step():
                # An error may quote what a client or a plugin wrote, and cannot be encoded then.
                for i, o in enumerate(outputs):
                    if o.error:
                        outputs[i] = msgspec.structs.replace(o, error=printable(o.error))
                channel.send(StepOutputs(outputs))
        elif not has_work and (not commands or time.monotonic() - check_time >= CHECK_SECONDS):
            _check_parent(parent)
            core.check_health()
            check_time = time.monotonic()


def _handle_command(channel: Channel, core: EngineCore, command: Command) -> None:
    match command:
        case AddRequests(requests):
            for data in requests:
                _add(channel, core, data)
        case AbortRequests(ids):
            core.abort_requests(ids)
        case Ping(number):
            channel.send(Pong(number, core.stats))
        case _:
            raise EngineError(f"unexpected command {type(command).__name__}")


def _add(channel: Channel, core: EngineCore, data: msgspec.Raw) -> None:
    """Add a request. Any error except ``EngineError`` only rejects this request."""
    try:
        core.add_request(decode_request(data))
    except EngineError:
        raise
    except TreadleError as error:
        channel.send(RequestRejected(request_id(data), Failure.of(error)))
    except Exception:
        id = request_id(data)
        log.exception("adding request %s failed", id)
        failure = Failure("EngineError", "the engine failed to add this request")
        channel.send(RequestRejected(id, failure))


def _check_parent(parent: int) -> None:
    """Raise ``ConnectionClosed`` if the parent has exited.

    The socket cannot tell: another child may have inherited the parent's end and keep it open.
    """
    if os.getppid() != parent:
        raise ConnectionClosed


def _report_failure(channel: Channel, report: Report) -> None:
    try:
        channel.send(report)
        channel.finish()
    except ConnectionClosed:
        log.warning("the parent has closed the connection; not sent: %s", report)


def _create_core(config: EngineConfig) -> EngineCore:
    from treadle.engine.core import EngineCore
    from treadle.plugins import PluginManager

    return EngineCore(config, PluginManager(config.plugins))


def main(fd: int, create_core: Callable[[EngineConfig], EngineCore] = _create_core) -> None:
    """Run the child process. ``fd`` is its end of a socket pair. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_library_environment()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    end_with_parent(fd, grace=EXIT_SECONDS)
    status = serve(Channel(sock), create_core)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads and exit handlers of libraries may hang after a failure, so skip them: the engine
    # has already been closed.
    os._exit(status)
