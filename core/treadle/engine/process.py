"""The engine process: commands in, steps out, nothing of the API in between.

It ends when told to, when the socket closes, when its parent is gone, or when the engine fails.
SIGINT and SIGTERM are left to the parent, which decides what to finish first: a terminal and a
service manager send them to every process at once.
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

from treadle.api.requests import EngineRequest
from treadle.config import patient_threads
from treadle.engine.ipc import (
    Abort,
    Add,
    Command,
    Dead,
    Ping,
    Pong,
    Ready,
    Refused,
    Report,
    Start,
    Steps,
    Stop,
    decode_command,
)
from treadle.errors import EngineError, TreadleError
from treadle.processes.failure import Failure
from treadle.processes.framing import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from treadle.config import EngineConfig
    from treadle.engine.core import EngineCore

__all__ = ("Channel", "main", "serve")

log = logging.getLogger("treadle.engine")

IDLE_SECONDS = 2.0
# Between two looks at parent and workers, however often an idle engine is asked how it is.
CHECK_SECONDS = 1.0
RECEIVE = 256 * 1024
# What may wait for a parent that does not read, before steps wait for it too.
MOST_UNSENT = 64 * 2**20


class Closed(Exception):
    """The parent has closed its end."""


class Channel:
    """The child's end of the socket. Neither reading nor writing holds up a step."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameDecoder()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    def receive(self, timeout: float) -> list[Command]:
        """The commands that are there; waits up to ``timeout`` for the first bytes.

        Raises ``Closed`` at the end of the stream.
        """
        if timeout or self._unsent:
            events = self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0), timeout)
            if events & select.POLLOUT:
                self._flush()
            if not events & ~select.POLLOUT:  # POLLHUP is told without being asked for
                return []
        commands: list[Command] = []
        while True:
            try:
                data = self._sock.recv(RECEIVE)
            except BlockingIOError:
                return commands
            except ConnectionError as error:
                raise Closed from error
            if not data:
                raise Closed
            commands += [decode_command(payload) for payload in self._frames.feed(data)]
            if len(data) < RECEIVE:
                return commands

    def send(self, *reports: Report) -> None:
        """Send, or keep for later what the socket has no room for. Raises ``Closed``."""
        data = b"".join(map(encode_frame, reports))
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self._flush()
        while self._unsent_bytes > MOST_UNSENT:  # the parent is stuck; a slow step beats no memory
            self._wait(select.POLLOUT, IDLE_SECONDS)
            self._flush()

    def finish(self, seconds: float = 5.0) -> None:
        """Send what is left, as far as the parent takes it."""
        try:
            while self._unsent:
                if not self._wait(select.POLLOUT, seconds):
                    return
                self._flush()
        except Closed:
            return
        finally:
            self._sock.close()

    def _wait(self, events: int, seconds: float) -> int:
        """The events that came in time, 0 if none did."""
        # Not select(): the child's descriptor has the parent's number, which may be beyond 1023.
        poll = select.poll()
        poll.register(self._sock, events)
        ready = poll.poll(seconds * 1000)
        return ready[0][1] if ready else 0

    def _flush(self) -> None:
        while self._unsent:
            piece = self._unsent[0]
            try:
                sent = self._sock.send(piece)
            except BlockingIOError:
                return
            except (ConnectionError, BrokenPipeError) as error:
                raise Closed from error
            self._unsent_bytes -= sent
            if sent == len(piece):
                self._unsent.popleft()
            else:
                self._unsent[0] = piece[sent:]


def serve(channel: Channel, make: Callable[[EngineConfig], EngineCore]) -> int:
    """Run one engine until it ends; the result is the exit status.

    The core is made by ``make`` from the configuration in the first message.
    """
    core: EngineCore | None = None
    parent = os.getppid()
    try:
        start = _first(channel, parent)
        logging.basicConfig(
            level=start.log_level, format="%(levelname)s %(asctime)s engine %(name)s: %(message)s"
        )
        core = make(start.config)
        channel.send(Ready(core.facts))
        _loop(channel, core, parent)
    except Closed:
        return 0
    except BaseException as error:  # whatever it is, the parent must hear of it
        if not isinstance(error, TreadleError):
            log.exception("the engine failed")
        _last_words(channel, Dead(Failure.of(error)))
        return 1
    finally:
        if core is not None:
            core.close()
    return 0


def _first(channel: Channel, parent: int) -> Start:
    while True:
        for command in channel.receive(IDLE_SECONDS):
            if isinstance(command, Start):
                return command
            raise EngineError(f"the first command was {type(command).__name__}, not Start")
        _check_parent(parent)


def _loop(channel: Channel, core: EngineCore, parent: int) -> None:
    checked = time.monotonic()
    while True:
        busy = core.has_work
        commands = channel.receive(0.0 if busy else IDLE_SECONDS)
        for command in commands:
            if isinstance(command, Stop):
                return
            _obey(channel, core, command)
        if core.has_work:
            if outputs := core.step():
                channel.send(Steps(outputs))
        elif not busy and (not commands or time.monotonic() - checked >= CHECK_SECONDS):
            _check_parent(parent)
            core.check()
            checked = time.monotonic()


def _obey(channel: Channel, core: EngineCore, command: Command) -> None:
    match command:
        case Add(requests):
            for request in requests:
                _add(channel, core, request)
        case Abort(ids):
            core.abort(ids)
        case Ping(number):
            channel.send(Pong(number, core.stats))
        case _:
            raise EngineError(f"unexpected command {type(command).__name__}")


def _add(channel: Channel, core: EngineCore, request: EngineRequest) -> None:
    """A request that cannot be taken is its sender's problem alone, unless the engine says that it
    is its own."""
    try:
        core.add(request)
    except EngineError:
        raise
    except TreadleError as error:
        channel.send(Refused(request.id, Failure.of(error)))
    except Exception:
        log.exception("adding request %s failed", request.id)
        failure = Failure("EngineError", "the engine could not take this request")
        channel.send(Refused(request.id, failure))


def _check_parent(parent: int) -> None:
    """A socket stays open while any heir of the parent holds it; the parent's id does not lie."""
    if os.getppid() != parent:
        raise Closed


def _last_words(channel: Channel, report: Report) -> None:
    try:
        channel.send(report)
        channel.finish()
    except Closed:
        log.warning("the parent has gone without hearing: %s", report)


def _make(config: EngineConfig) -> EngineCore:
    from treadle.engine.core import EngineCore
    from treadle.plugins import PluginManager

    return EngineCore(config, PluginManager(config.plugins))


def main(fd: int, make: Callable[[EngineConfig], EngineCore] = _make) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    patient_threads()
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    status = serve(Channel(sock), make)
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads and exit handlers may hang after a failure; everything of ours is closed.
    os._exit(status)
