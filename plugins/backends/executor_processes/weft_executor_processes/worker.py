"""One rank in its own process: builds its shard of the model and obeys orders."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from weft.config import EngineConfig
from weft.plugins import Host, Plan
from weft.runner.device import pick_device
from weft.runner.runner import ModelRunner
from weft_executor_processes.collective import TorchCollective
from weft_executor_processes.wire import (
    Collect,
    Collected,
    Failed,
    Launch,
    Sample,
    Started,
    Stop,
    decode_order,
    encode,
)

__all__ = ("run_worker",)


def run_worker(
    pipe: Connection, rank: int, size: int, config: bytes, plan: bytes, meeting: str
) -> None:
    """The body of a worker process. Ends on ``Stop``, or when the executor's end of the pipe closes."""
    # A Ctrl-C in the terminal reaches the whole group; the executor decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(pipe, rank, size, config, plan, meeting)
    except EOFError:
        pass  # the executor's process is gone
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(encode(Failed(type(error).__name__, str(error))))
    # A rank that stops in the middle of a collective must not wait for the others to leave it.
    os._exit(0)


def _serve(
    pipe: Connection, rank: int, size: int, config_data: bytes, plan_data: bytes, meeting: str
) -> None:
    config = msgspec.msgpack.decode(config_data, type=EngineConfig)
    host = Host.from_plan(msgspec.msgpack.decode(plan_data, type=Plan), config.plugins)
    device = pick_device(config.device.device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif config.device.threads is None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    ranks = TorchCollective(rank, size, device, Path(meeting))
    runner = ModelRunner(config, host, ranks)
    pipe.send_bytes(encode(Started(runner.facts)))
    while True:
        order = decode_order(pipe.recv_bytes())
        if isinstance(order, Launch):
            runner.launch(order.plan)
        elif isinstance(order, Sample):
            runner.sample(order.edits)
        elif isinstance(order, Collect):
            result = runner.collect()
            if rank == 0:
                pipe.send_bytes(encode(Collected(result)))
        elif isinstance(order, Stop):
            ranks.close()
            return
