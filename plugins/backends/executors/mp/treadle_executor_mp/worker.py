"""One rank in its own process: commands and replies travel over a socket."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
from multiprocessing.connection import Connection

from treadle.processes.lifeline import end_with_parent
from treadle_worker_kit.garbage import without_collections
from treadle_worker_kit.messages import (
    Collected,
    Failed,
    Progress,
    Started,
    StartWorker,
    Stop,
    WorkerReply,
    decode_command,
    encode,
)

__all__ = ("kill_with_parent_thread", "main")

PR_SET_PDEATHSIG = 1


def main(fd: int) -> None:
    """Run a worker process; ``fd`` is its end of a socket pair.

    It ends after ``Stop``, or with the executor's process, also while it waits for a device. SIGUSR1 makes
    it write the stacks of its threads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)  # not for compilers that it runs
    kill_with_parent_thread()
    end_with_parent(fd)
    faulthandler.register(signal.SIGUSR1)
    pipe = Connection(fd)
    try:
        _serve(pipe)
    except EOFError:
        pass  # the executor's process is gone
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(encode(_failure(error)))
    # A rank that stops in the middle of a collective must not wait for the others to leave it.
    os._exit(0)


def kill_with_parent_thread() -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux).

    It works even while every thread of this process waits for a device. The
    executor keeps the thread that starts its workers. A parent that has ended before this call is noticed
    by ``end_with_parent`` only.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _serve(pipe: Connection) -> None:
    def reply(message: WorkerReply) -> None:
        pipe.send_bytes(encode(message))

    reply(Progress("imports"))
    with without_collections():
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from treadle_worker_kit.worker import Worker

    start = decode_command(pipe.recv_bytes())
    if not isinstance(start, StartWorker):
        raise TypeError(f"the first command is {type(start).__name__}; expected StartWorker")
    # Ranks meet in a file: no port is opened that somebody else could connect to.
    worker = Worker(start, FileStore(start.rendezvous, start.world_size), reply)
    reply(Started(worker.info))
    while True:
        command = decode_command(pipe.recv_bytes())
        result = worker.execute(command)
        if isinstance(command, Stop):
            return
        if result is not None and start.rank == 0:
            reply(Collected(result))


def _failure(error: BaseException) -> Failed:
    """Return the reply for ``error``, which an import may have raised, too."""
    try:
        from treadle_worker_kit.worker import failure_reply
    except Exception:
        return Failed.of(error)
    return failure_reply(error)
