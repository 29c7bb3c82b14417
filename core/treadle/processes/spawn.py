"""Start a Python process of ours: a fresh interpreter that shares one socket with its parent.

``multiprocessing`` is not used: it imports the user's main module again, unpickles what it receives
and leaves helper processes. The child has its own process group, so that Control-C in a terminal
does not reach it, and notices the end of its parent by the end of the socket.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys

from treadle.processes.logs import LogSetup

__all__ = ("exit_reason", "spawn")

# The child imports from where the parent does, and nothing from its working directory.
BOOT = (
    "import json, sys; sys.path[:], log, process = json.loads(sys.argv[2]); "
    "from {log[0]} import {log[2]}; {log[2]}(log, process); "
    "from {module} import {name}; {name}(int(sys.argv[1]))"
)


def spawn(
    entry: str, *, buffer_bytes: int | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run ``entry`` (``module:function``) in a new process; return it and our end of its socket.

    The function receives the number of its file descriptor. ``buffer_bytes`` is the size of the
    send buffer of both ends, ``None`` for the system's. Raises ``OSError``.
    """
    module, _, name = entry.partition(":")
    setup = LogSetup.current()
    parent_sock, child_sock = socket.socketpair()
    with child_sock:
        if buffer_bytes is not None:
            for end in (parent_sock, child_sock):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        command = [
            sys.executable,
            *(["-O"] if sys.flags.optimize else []),
            "-P",
            "-c",
            BOOT.format(module=module, name=name, log=setup.start.partition(":")),
            str(child_sock.fileno()),
            json.dumps([sys.path, setup.settings, module.split(".")[-2:][0]]),
        ]
        try:
            child = subprocess.Popen(
                command, pass_fds=[child_sock.fileno()], stdin=subprocess.DEVNULL, process_group=0
            )
        except BaseException:
            parent_sock.close()
            raise
    return child, parent_sock


def exit_reason(status: int) -> str:
    """Return how a process ended, for a sentence about it: ``was killed by SIGKILL``."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
