"""The end of a child process when its parent ends, whatever either of them is doing.

A child that reads its socket notices the end of its parent there. One that computes does not: a kernel
that waits for another rank, a compiler or a download may take minutes, or never end. So the kernel and a
thread watch for it. Neither of them alone is enough: the kernel's signal is sent when the *thread* ends
that started the child, so that only whoever keeps that thread may ask for it, and no thread runs while
another one is stuck in a library that holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time

__all__ = ("end_with_parent", "kill_with_parent_thread")

CHECK_SECONDS = 1.0
PR_SET_PDEATHSIG = 1
# Not in every build of Python's select module.
POLLRDHUP = getattr(select, "POLLRDHUP", 0)


def end_with_parent(fd: int, *, grace: float = 0.0) -> None:
    """End this process once its parent has ended or closed its end of the socket ``fd``.

    Returns at once; a thread watches. ``grace`` are the seconds that the process then has to end in its
    own way. Nothing is read from the socket.
    """
    arguments = (fd, os.getppid(), grace)
    threading.Thread(target=_watch, args=arguments, name="treadle-lifeline", daemon=True).start()


def kill_with_parent_thread() -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux).

    It works even while every thread of this process waits for a device. A parent that has ended before
    this call is noticed by ``end_with_parent`` only.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _watch(fd: int, parent: int, grace: float) -> None:
    poll = select.poll()
    poll.register(fd, POLLRDHUP)  # POLLHUP is always reported
    # Another child may have inherited the parent's end, which then stays open without it.
    while os.getppid() == parent and not poll.poll(CHECK_SECONDS * 1e3):
        pass
    time.sleep(grace)
    os._exit(1)
