"""Calls that may never return or exhaust the memory, made in a process that can be killed.

A thread cannot be stopped and has no memory limit. A process that exceeds its limits is killed: one
request fails, and the next one gets a new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from typing import Any

from treadle.processes.framing import receive_frame, send_frame
from treadle.processes.spawn import exit_reason, spawn

__all__ = (
    "IsolatedProcess",
    "ProcessExit",
    "anonymous_bytes",
    "exchange",
    "ignore_interrupts",
    "limit_cpu",
    "limit_memory",
    "resident",
    "serve_requests",
)

log = logging.getLogger("treadle.processes")

HELLO_SECONDS = 120.0
"""How long a new child may take for its first response, for which it may import and read files."""
EXIT_SECONDS = 1.0
"""How long a child whose socket has ended may take to exit, before it is killed."""


class ProcessExit(ConnectionError):
    """The process of a request ended before it answered. ``status`` is that of ``Popen``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process {exit_reason(status)}")
        self.status = status

    @property
    def was_killed(self) -> bool:
        """Whether others ended it: an operator, or the system for want of memory. None of the
        limits of this module sends this signal."""
        return self.status == -signal.SIGKILL


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
        self._num_closes = 0

    @property
    def pid(self) -> int | None:
        """``None`` while there is no child."""
        child = self._child
        return None if child is None else child.pid

    def start(self) -> None:
        """Start the child before the first request. Raises ``ChildProcessError``."""
        with self._lock:
            self._connect()

    def request(self, payload: bytes, seconds: float) -> bytes:
        """Send ``payload`` and return the response.

        Raises ``TimeoutError`` after ``seconds``, ``ProcessExit`` if the child died of its limits,
        and ``ChildProcessError`` if none can be started. Then the next request gets a new child, and
        so does this one, once, if others have killed its child.
        """
        num_closes = self._num_closes
        try:
            return self._request(payload, seconds)
        except ProcessExit as error:
            if not error.was_killed or self._num_closes != num_closes:
                raise
            return self._request(payload, seconds)

    def close(self) -> None:
        """End the child now, even during a request. The next request starts another one."""
        self._num_closes += 1
        child = self._child
        if child is not None:
            _kill_group(child)
        # A thread that waits for the child holds the lock, gets an error and cleans up itself.
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _request(self, payload: bytes, seconds: float) -> bytes:
        with self._lock:
            sock = self._connect()
            try:
                return exchange(sock, payload, seconds)
            except TimeoutError:
                self._end()
                raise
            except OSError as error:
                raise ProcessExit(self._end_itself()) from error

    def _connect(self) -> socket.socket:
        """Return the socket of a child that lives, a new one if need be. Hold the lock."""
        if self._child is not None and self._child.poll() is not None:
            self._end_itself()  # killed while it had nothing to do
        if self._sock is not None:
            return self._sock
        child, sock = spawn(self._entry)
        self._child, self._sock = child, sock
        self._stop = weakref.finalize(self, _kill, child, sock)
        if self._hello is not None:
            try:
                exchange(sock, self._hello, HELLO_SECONDS)
            except TimeoutError as error:
                self._end()
                raise ChildProcessError(
                    f"the process says nothing for {HELLO_SECONDS:g} s"
                ) from error
            except OSError as error:
                reason = exit_reason(self._end_itself())
                raise ChildProcessError(f"the process {reason} while it started") from error
        return sock

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._sock = self._child = self._stop = None

    def _end_itself(self) -> int:
        """Let a child whose socket has ended exit, and return its status."""
        child = self._child
        if child is None:
            return -signal.SIGKILL
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(EXIT_SECONDS)
        self._end()
        if (status := child.wait()) < 0 and not self._num_closes:
            log.warning("process %d of %s %s", child.pid, self._entry, exit_reason(status))
        return status


def serve_requests(fd: int, handle: Callable[[bytes], bytes]) -> None:
    """Run in the child: pass each request to ``handle`` until the parent closes the socket."""
    ignore_interrupts()
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        while True:
            send_frame(sock, handle(receive_frame(sock)))


def ignore_interrupts() -> None:
    """Control-C is for the parent, and a crash leaves no file behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(resource.RLIMIT_CORE, 0)


def limit_memory(more: int) -> None:
    """Let this process grow by at most ``more`` bytes of address space from now on."""
    _limit(resource.RLIMIT_AS, _pages(0) + more)


def limit_cpu(seconds: float) -> None:
    """Kill this process once it has used ``seconds`` more of CPU time, with SIGPROF."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def resident() -> int:
    """Return ``anonymous_bytes`` after freeing what can be freed."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    return anonymous_bytes()


def anonymous_bytes() -> int:
    """Return the resident bytes of this process that are no file's; 0 if unknown."""
    return _pages(1) - _pages(2)


def _pages(field: int) -> int:
    """Return a field of Linux's ``statm`` in bytes: 0 is the address space, 1 is resident memory, 2 of it shared."""
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
    _kill_group(child)
    child.wait()


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child, and what it has forked: it leads a process group."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def exchange(sock: socket.socket, payload: bytes, seconds: float) -> bytes:
    """Send a request and return its response. Raises ``OSError``."""
    sock.settimeout(seconds)
    send_frame(sock, payload)
    return receive_frame(sock, seconds)
