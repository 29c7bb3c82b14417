"""One rank in its own process: hears orders on a socket, answers there."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection

from torch.distributed import FileStore  # type: ignore[attr-defined]

from treadle.runner.worker import Rank, failed
from treadle.runner.worker_messages import (
    Collected,
    Start,
    Started,
    Stop,
    decode_order,
    encode,
)

__all__ = ("main",)


def main(fd: int) -> None:
    """The body of a worker process; ``fd`` is its end of a socket pair.

    It ends when told to, or when the executor's end is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(fd)
    try:
        _serve(pipe)
    except EOFError:
        pass  # the executor's process is gone
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(encode(failed(error)))
    # A rank that stops in the middle of a collective must not wait for the others to leave it.
    os._exit(0)


def _serve(pipe: Connection) -> None:
    start = decode_order(pipe.recv_bytes())
    if not isinstance(start, Start):
        raise TypeError(f"the first order is {type(start).__name__}")
    # Ranks meet in a file: no port is opened that somebody else could connect to.
    rank = Rank(start, FileStore(start.meeting, start.size))
    pipe.send_bytes(encode(Started(rank.facts)))
    while True:
        order = decode_order(pipe.recv_bytes())
        result = rank.obey(order)
        if isinstance(order, Stop):
            return
        if result is not None and start.rank == 0:
            pipe.send_bytes(encode(Collected(result)))
