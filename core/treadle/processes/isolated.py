"""Calls that may never return or exhaust the memory, made in a process that can be killed.

A thread cannot be stopped and has no memory limit. A process that exceeds its limits is killed: one
request fails, and the next one gets a new process.
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

from treadle.processes.framing import receive_frame, send_frame
from treadle.processes.spawn import spawn

__all__ = ("IsolatedProcess", "limit_cpu", "limit_memory", "resident", "serve_requests")

HELLO_SECONDS = 120.0
"""How long a new child may take for its first response, for which it may import and read files."""


class IsolatedProcess:
    """A child process that serves one request at a time. Thread-safe.

    ``entry`` (``module:function``) is called in the child with its end of a socket, which it passes
    to ``serve_requests``. ``hello`` is the first request to every new child; its response is
    ignored. The child starts when it is first needed and ends with this object or its process.
    """

    def __init__(self, entry: str, hello: bytes | None = None) -> None:
        self._entry = entry
        self._hello = hello
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
        """Start the child before the first request. Raises ``OSError``."""
        with self._lock:
            if self._sock is None:
                self._start()

    def request(self, payload: bytes, seconds: float) -> bytes:
        """Send ``payload`` and return the response.

        Raises ``TimeoutError`` after ``seconds`` and another ``OSError`` if the child died of its
        limits. After either one the next request gets a new child.
        """
        with self._lock:
            sock = self._sock or self._start()
            try:
                return _exchange(sock, payload, seconds)
            except OSError:
                self._end()
                raise

    def close(self) -> None:
        """End the child now, even during a request. The next request starts another one."""
        child = self._child
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        # A thread that waits for the child holds the lock, gets an error and cleans up itself.
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
        child, sock = spawn(self._entry)
        self._child, self._sock = child, sock
        self._stop = weakref.finalize(self, _kill, child, sock)
        if self._hello is not None:
            try:
                _exchange(sock, self._hello, HELLO_SECONDS)
            except OSError:
                self._end()
                raise
        return sock


def serve_requests(fd: int, handle: Callable[[bytes], bytes]) -> None:
    """Run in the child: pass each request to ``handle`` until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        while True:
            send_frame(sock, handle(receive_frame(sock)))


def limit_memory(more: int) -> None:
    """Let this process grow by at most ``more`` bytes of address space from now on."""
    _limit(resource.RLIMIT_AS, _pages(0) + more)


def limit_cpu(seconds: float) -> None:
    """Kill this process once it has used ``seconds`` more of CPU time, rounded up."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + seconds) + 1)


def resident() -> int:
    """Return the resident bytes of this process after freeing what can be freed; 0 if unknown."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    return _pages(1)


def _pages(field: int) -> int:
    """Return a field of Linux's ``statm`` in bytes: 0 is the address space, 1 is resident memory."""
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


def _exchange(sock: socket.socket, payload: bytes, seconds: float) -> bytes:
    sock.settimeout(seconds)
    send_frame(sock, payload)
    return receive_frame(sock)
