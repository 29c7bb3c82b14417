"""Runs chat templates in a process with limits (rule J1).

The sandbox keeps a template from Python's insides, not from loops without end or texts of
gigabytes, and a thread cannot be stopped. A process can: past its deadline or its memory it is
killed, the one request fails, and the next one gets a new process.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.engine.child import spawn
from weft.errors import CheckpointError, RequestError

__all__ = ("TemplateProcess", "main")

SECONDS = 10.0  # of which a new child needs some to start
MEMORY = 1 << 30
PREFIX = 4
RECEIVE = 256 * 1024


class _Ask(msgspec.Struct, array_like=True):
    source: str
    variables: dict[str, Any]


class _Answer(msgspec.Struct, array_like=True):
    """``text``, or why there is none. ``broken`` says that the template itself is at fault."""

    text: str | None
    why: str = ""
    broken: bool = False


class TemplateProcess:
    """Renders in a child, one request at a time. Safe in threads.

    The child is started at once, and ends with this object or its process.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._stop: weakref.finalize[Any, Any] | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Raises ``RequestError``, also for a template that takes too long or too much, and
        ``CheckpointError`` for one that cannot be compiled."""
        with self._lock:
            sock = self._sock or self._start()
            try:
                sock.settimeout(self._seconds)
                _send(sock, msgspec.msgpack.encode(_Ask(source, dict(variables))))
                answer = msgspec.msgpack.decode(_receive(sock), type=_Answer)
            except TimeoutError:
                self.close()
                raise RequestError(
                    f"the chat template did not finish within {self._seconds:g} s; send less, or "
                    "another template",
                    param="messages",
                ) from None
            except (OSError, msgspec.MsgspecError) as error:
                self.close()
                raise RequestError(
                    f"the chat template broke its process, whose memory is limited to "
                    f"{MEMORY >> 20} MiB; send less, or use another template",
                    param="messages",
                ) from error
        if answer.text is not None:
            return answer.text
        raise CheckpointError(answer.why) if answer.broken else RequestError(answer.why, param="messages")

    def close(self) -> None:
        """End the child. The next ``render`` starts another one."""
        if self._stop is not None:
            self._stop()
        self._sock = self._child = self._stop = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            child = spawn("weft.frontend.isolation:main", theirs)
        self._child, self._sock = child, ours
        self._stop = weakref.finalize(self, _end, child, ours)
        return ours


def _end(child: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    child.wait()


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(len(data).to_bytes(PREFIX, "little") + data)


def _receive(sock: socket.socket) -> bytes:
    """One frame. Raises ``ConnectionError`` at the end of the stream."""
    size = int.from_bytes(_exactly(sock, PREFIX), "little")
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(RECEIVE, size - len(data)))
        if not piece:
            raise ConnectionError("the other end has closed the socket")
        data += piece
    return bytes(data)


# ------------------------------------------------------------------------------- the child


def main(fd: int) -> None:
    """The entry of the child; ``fd`` is its end of a socket pair."""
    from weft.frontend.template import ChatTemplate

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for limit, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS knows no limit of memory
            resource.setrlimit(limit, (most, most))
    templates: dict[str, ChatTemplate] = {}
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        while True:
            ask = msgspec.msgpack.decode(_receive(sock), type=_Ask)
            # Nobody is left to kill a child whose parent died while it was in a loop.
            used = resource.getrusage(resource.RUSAGE_SELF)
            soft = int(used.ru_utime + used.ru_stime + SECONDS) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
            _send(sock, msgspec.msgpack.encode(_answer(templates, ask)))


def _answer(templates: dict[str, Any], ask: _Ask) -> _Answer:
    from weft.frontend.template import ChatTemplate

    try:
        if ask.source not in templates:
            templates[ask.source] = ChatTemplate(ask.source)
        return _Answer(templates[ask.source].render(ask.variables))
    except RequestError as error:
        return _Answer(None, str(error))
    except CheckpointError as error:
        return _Answer(None, str(error), broken=True)
