"""Questions that may run forever or eat all memory, asked in a process that can be killed."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from typing import Any

from weft.engine.child import spawn

__all__ = ("IsolatedProcess", "answer_questions", "limit_cpu", "limit_memory")

PREFIX = 4
RECEIVE = 256 * 1024


class IsolatedProcess:
    """A child that answers one question at a time. Safe in threads.

    ``entry`` (``module:function``) is called in the child with its end of a socket, which it hands
    to ``answer_questions``. ``hello`` is its first question, asked again of every new child. The
    child is started when it is first needed and ends with this object or its process.
    """

    def __init__(self, entry: str, hello: bytes, *, hello_seconds: float = 120.0) -> None:
        self._entry = entry
        self._hello = hello
        self._hello_seconds = hello_seconds
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    def ask(self, question: bytes, seconds: float) -> bytes:
        """The answer. Raises ``TimeoutError`` after ``seconds`` and ``ConnectionError`` if the child
        has died of its limits; either way the next question gets a new child."""
        with self._lock:
            sock = self._sock or self._start()
            try:
                return _exchange(sock, question, seconds)
            except OSError:
                self._end()
                raise

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._sock = self._stop = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            child = spawn(self._entry, theirs)
        self._sock = ours
        self._stop = weakref.finalize(self, _kill, child, ours)
        try:
            _exchange(ours, self._hello, self._hello_seconds)
        except OSError:
            self._end()
            raise
        return ours


def answer_questions(fd: int, answer: Callable[[bytes], bytes]) -> None:
    """The life of a child: answer until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        while True:
            _send(sock, answer(_receive(sock)))


def limit_memory(more: int) -> None:
    """From now on this process may grow by ``more`` bytes of address space."""
    with open("/proc/self/statm", encoding="ascii") as pages:
        now = int(pages.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))


def limit_cpu(seconds: float) -> None:
    """From now on this process may use ``seconds`` of CPU time, rounded up; then it is killed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _kill(child: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    child.wait()


def _exchange(sock: socket.socket, question: bytes, seconds: float) -> bytes:
    sock.settimeout(seconds)
    _send(sock, question)
    return _receive(sock)


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(len(data).to_bytes(PREFIX, "little") + data)


def _receive(sock: socket.socket) -> bytes:
    """One frame. Raises ``ConnectionError`` at the end of the stream."""
    return _exactly(sock, int.from_bytes(_exactly(sock, PREFIX), "little"))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(RECEIVE, size - len(data)))
        if not piece:
            raise ConnectionError("the other end has closed the socket")
        data += piece
    return bytes(data)
