"""One rank in its own process: commands and replies travel over a socket."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection

from torch.distributed import FileStore  # type: ignore[attr-defined]

from treadle_worker_kit.messages import (
    Collected,
    Started,
    StartWorker,
    Stop,
    decode_command,
    encode,
)
from treadle_worker_kit.worker import Worker, failure_reply

__all__ = ("main",)


def main(fd: int) -> None:
    """Run a worker process; ``fd`` is its end of a socket pair.

    It ends after ``Stop``, or when the executor's end is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(fd)
    try:
        _serve(pipe)
    except EOFError:
        pass  # the executor's process is gone
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(encode(failure_reply(error)))
    # A rank that stops in the middle of a collective must not wait for the others to leave it.
    os._exit(0)


def _serve(pipe: Connection) -> None:
    start = decode_command(pipe.recv_bytes())
    if not isinstance(start, StartWorker):
        raise TypeError(f"the first command is {type(start).__name__}; expected StartWorker")
    # Ranks meet in a file: no port is opened that somebody else could connect to.
    worker = Worker(start, FileStore(start.rendezvous, start.world_size))
    pipe.send_bytes(encode(Started(worker.info)))
    while True:
        command = decode_command(pipe.recv_bytes())
        result = worker.execute(command)
        if isinstance(command, Stop):
            return
        if result is not None and start.rank == 0:
            pipe.send_bytes(encode(Collected(result)))
