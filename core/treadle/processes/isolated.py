"""Questions that may run forever or eat all memory, asked in a process that can be killed.

A thread cannot be stopped and has no memory of its own. A process past its limits is killed, the
one question fails, and the next gets a new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from typing import Any

from treadle.processes.spawn import spawn

__all__ = ("IsolatedProcess", "answer_questions", "limit_cpu", "limit_memory", "resident")

PREFIX = 4
RECEIVE = 256 * 1024


class IsolatedProcess:
    """A child that answers one question at a time. Safe in threads.

    ``entry`` (``module:function``) is called in the child with its end of a socket, which it hands
    to ``answer_questions``. ``hello`` is the first question to every new child; its answer is not
    looked at. The child is started when it is first needed and ends with this object or its
    process.
    """

    def __init__(
        self, entry: str, hello: bytes | None = None, *, hello_seconds: float = 120.0
    ) -> None:
        self._entry = entry
        self._hello = hello
        self._hello_seconds = hello_seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._stop: weakref.finalize[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """``None`` while there is no child."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> None:
        """Start the child before the first question. Raises ``OSError``."""
        with self._lock:
            if self._sock is None:
                self._start()

    def ask(self, question: bytes, seconds: float) -> bytes:
        """The answer. Raises ``TimeoutError`` after ``seconds`` and another ``OSError`` if the
        child has died of its limits; either way the next question gets a new child."""
        with self._lock:
            sock = self._sock or self._start()
            try:
                return _exchange(sock, question, seconds)
            except OSError:
                self._end()
                raise

    def close(self) -> None:
        """End the child now, also in the middle of a question. The next one starts another."""
        child = self._child
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        # Whoever is waiting for its answer holds the lock, gets an error and does the rest.
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._sock = self._child = self._stop = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            child = spawn(self._entry, theirs)
        self._child, self._sock = child, ours
        self._stop = weakref.finalize(self, _kill, child, ours)
        if self._hello is not None:
            try:
                _exchange(ours, self._hello, self._hello_seconds)
            except OSError:
                self._end()
                raise
        return ours


def answer_questions(fd: int, answer: Callable[[bytes], bytes]) -> None:
    """The life of a child: answer until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        while True:
            _send(sock, answer(_receive(sock)))


def limit_memory(more: int) -> None:
    """From now on this process may grow by ``more`` bytes of address space."""
    _limit(resource.RLIMIT_AS, _pages(0) + more)


def limit_cpu(seconds: float) -> None:
    """From now on this process may use ``seconds`` of CPU time, rounded up; then it is killed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 1)


def resident() -> int:
    """The bytes of memory that this process uses, without what it has freed; 0 if unknown."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    return _pages(1)


def _pages(field: int) -> int:
    """A field of Linux's ``statm`` in bytes: 0 is the address space, 1 what is resident."""
    try:
        with open("/proc/self/statm", encoding="ascii") as pages:
            return int(pages.read().split()[field]) * resource.getpagesize()
    except OSError:
        return 0


def _limit(kind: int, soft: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS has no limit of memory
        resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


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
