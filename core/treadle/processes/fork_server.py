"""Calls with limits that share what is dear to load: each runs in a fork of one process.

A fork takes milliseconds and no memory of its own for what its parent has loaded. A call beyond its
limits costs its own fork, and calls run beside each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from treadle.processes.framing import receive_frame, send_frame
from treadle.processes.isolated import IsolatedProcess, ProcessExit, exchange, ignore_interrupts

__all__ = ("ForkServer", "serve_forks")

ANSWER, EXIT = b"\0", b"\1"
"""The first byte of a reply: what follows is the answer, or the status of a fork that has none."""


class ForkServer(IsolatedProcess):
    """A child process that serves each request in a fork of its own, any number at once.

    ``entry`` passes its socket to ``serve_forks``. A request gets a socket, which the fork inherits.
    """

    def _request(self, payload: bytes, seconds: float) -> bytes:
        mine, its = socket.socketpair()
        with mine:
            with self._lock, its:
                server = self._connect()
                with contextlib.suppress(OSError):  # it is gone: the answer's socket ends, too
                    socket.send_fds(server, [ANSWER], [its.fileno()])
            try:
                reply = exchange(mine, payload, seconds)
            except OSError as error:
                with self._lock:
                    if self._sock is server:
                        self._end()
                if isinstance(error, TimeoutError):
                    raise
                # The server does nothing that a request could have asked for.
                raise ProcessExit(-signal.SIGKILL) from error
        if reply[:1] == EXIT:
            raise ProcessExit(int(reply[1:]))
        return reply[1:]


def serve_forks(fd: int, prepare: Callable[[bytes], Any], handle: Callable[[bytes], bytes]) -> None:
    """Run in the child: ``prepare`` for the hello, then ``handle`` each request in a fork.

    ``prepare`` leaves no threads behind, which a fork would not have.
    """
    ignore_interrupts()
    sockets: dict[int, socket.socket] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):  # of a signal during this one: all are reaped
            while sockets:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                with sockets.pop(pid, None) or contextlib.nullcontext() as sock:
                    if status and sock is not None:
                        with contextlib.suppress(OSError):  # nobody waits for it any more
                            send_frame(sock, EXIT + b"%d" % os.waitstatus_to_exitcode(status))

    with socket.socket(fileno=fd) as server, contextlib.suppress(ConnectionError):
        prepare(receive_frame(server))
        send_frame(server, b"")
        signal.signal(signal.SIGCHLD, reap)
        while True:
            _, fds, _, _ = socket.recv_fds(server, 1, 1)
            if not fds:
                return
            sock = socket.socket(fileno=fds[0])
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if not pid:
                for other in (server, *sockets.values()):
                    other.close()
                _answer(sock, handle)
            sockets[pid] = sock
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _answer(sock: socket.socket, handle: Callable[[bytes], bytes]) -> None:
    """Handle one request in the fork, and leave without the end of an ordinary interpreter."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        send_frame(sock, ANSWER + handle(receive_frame(sock)))
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)
