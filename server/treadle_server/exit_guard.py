"""The end of the process after a signal, whatever keeps the event loop or the interpreter.

A plugin may block the event loop for ever, refuse to be cancelled, or hang in an exit handler. The
system writes the number of each signal into a socket, which a thread reads beside the loop.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

__all__ = ("EXIT_SECONDS", "ExitGuard")

log = logging.getLogger("treadle.server")

EXIT_SECONDS = 20.0
"""Seconds after the drain in which an orderly end is possible: requests that are cut off, shutdown
hooks, the engine."""
ENDING = frozenset({signal.SIGTERM, signal.SIGINT})


class ExitGuard:
    """Ends the process ``seconds`` after the first signal that asks for it, unless it is left before."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, _end, (seconds,))
        self._timer.daemon = True

    def __enter__(self) -> ExitGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the signals that the loop has taken before. To be entered in the main thread."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        loop_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=self._listen, args=(receiver, loop_fd), name="treadle-exit", daemon=True
        ).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(loop_fd)
            sender.close()

    def _listen(self, receiver: socket.socket, loop_fd: int) -> None:
        with receiver:
            while numbers := receiver.recv(64):
                with contextlib.suppress(OSError):  # the loop is closed
                    os.write(loop_fd, numbers)
                if ENDING & set(numbers) and not self._timer.is_alive():
                    self._timer.start()


def _end(seconds: float) -> None:
    log.error(
        "the server has not ended %g s after the signal, and is ended now; this is what it does:",
        seconds,
    )
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    os._exit(1)
