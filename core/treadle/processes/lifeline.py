"""The end of a child process when its parent ends, whatever either of them is doing.

A child that reads its socket notices the end of its parent there. One that computes does not: a kernel
that waits for another rank, a compiler or a download may take minutes, or never end. So a thread watches
for it. No thread runs while another one is stuck in a library that holds the interpreter's lock: where
that happens, the executor ``mp`` lets the kernel watch as well.
"""

from __future__ import annotations

import os
import select
import threading
import time

__all__ = ("end_with_parent",)

CHECK_SECONDS = 1.0
# Not in every build of Python's select module.
POLLRDHUP = getattr(select, "POLLRDHUP", 0)


def end_with_parent(fd: int, *, grace: float = 0.0) -> None:
    """End this process once its parent has ended or closed its end of the socket ``fd``.

    Returns at once; a thread watches. ``grace`` are the seconds that the process then has to end in its
    own way. Nothing is read from the socket.
    """
    arguments = (fd, os.getppid(), grace)
    threading.Thread(target=_watch, args=arguments, name="treadle-lifeline", daemon=True).start()


def _watch(fd: int, parent: int, grace: float) -> None:
    poll = select.poll()
    poll.register(fd, POLLRDHUP)  # POLLHUP is always reported
    # Another child may have inherited the parent's end, which then stays open without it.
    while os.getppid() == parent and not poll.poll(CHECK_SECONDS * 1e3):
        pass
    time.sleep(grace)
    os._exit(1)
