"""One rank in its own process: builds its shard of the model and obeys orders."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from weft.plugins import Host
from weft.runner.device import pick_device
from weft.runner.runner import ModelRunner
from weft_executor_processes.collective import TorchCollective
from weft_executor_processes.wire import (
    Collect,
    Collected,
    Failed,
    Launch,
    Sample,
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
            pipe.send_bytes(encode(Failed(type(error).__name__, str(error))))
    # A rank that stops in the middle of a collective must not wait for the others to leave it.
    os._exit(0)


def _serve(pipe: Connection) -> None:
    start = decode_order(pipe.recv_bytes())
    if not isinstance(start, Start):
        raise TypeError(f"the first order is {type(start).__name__}")
    runner, ranks = _start(start)
    pipe.send_bytes(encode(Started(runner.facts)))
    while True:
        order = decode_order(pipe.recv_bytes())
        if isinstance(order, Launch):
            runner.launch(order.plan)
        elif isinstance(order, Sample):
            runner.sample(order.edits)
        elif isinstance(order, Collect):
            result = runner.collect()
            if start.rank == 0:
                pipe.send_bytes(encode(Collected(result)))
        elif isinstance(order, Stop):
            ranks.close()
            return


def _start(start: Start) -> tuple[ModelRunner, TorchCollective]:
    config = start.config
    host = Host.from_plan(start.plan, config.plugins)
    device = pick_device(config.device.device, start.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif config.device.threads is None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // start.size))
    ranks = TorchCollective(start.rank, start.size, device, Path(start.meeting))
    return ModelRunner(config, host, ranks), ranks
