"""Workers in processes of this machine, one socket for each."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from treadle.api.types import EngineInfo
from treadle.config import EngineConfig
from treadle.errors import EngineDeadError, EngineError
from treadle.processes.spawn import spawn
from treadle_worker_kit.group import WorkerGroupExecutor
from treadle_worker_kit.messages import (
    Collect,
    Failed,
    Progress,
    Stop,
    WorkerCommand,
    WorkerReply,
    decode_reply,
    encode,
)
from treadle_worker_kit.monitor import FIRST_STAGE

__all__ = ("MultiprocExecutor",)

log = logging.getLogger("treadle.workers")

STOP_SECONDS = 5.0
# A device gives back a killed process only when the driver has stopped its kernels.
KILL_SECONDS = 30.0
REASON_SECONDS = 0.5
CHECK_SECONDS = 1.0


class MultiprocExecutor(WorkerGroupExecutor):
    """A worker process for each rank. The ranks meet in a file of a temporary folder.

    ``entry`` (``module:function``) is what a worker runs.
    """

    def __init__(
        self, config: EngineConfig, host: Any, entry: str = "treadle_executor_mp.worker:main"
    ) -> None:
        super().__init__(config, host)
        self._entry = entry
        self._workers: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-")
        # Workers are killed when the thread ends that has started them, which the caller's may do.
        self._spawner = ThreadPoolExecutor(1, "treadle-workers")

    def start(self) -> EngineInfo:
        """Start the workers and wait until all of them have loaded their shards.

        Raises ``EngineError`` if one of them is longer in a stage than ``startup_timeout``.
        """
        world_size = self.world_size
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        for rank in range(world_size):
            worker, parent_socket = self._spawner.submit(spawn, self._entry).result()
            self._workers.append(worker)
            self._pipes.append(Connection(parent_socket.detach()))
            start = self.start_command(
                rank, rendezvous, local_rank=rank, local_world_size=world_size
            )
            self._send(rank, encode(start))
        replies: dict[int, WorkerReply] = {}
        while len(replies) < world_size:
            for rank, reply in self._receive(
                [r for r in range(world_size) if r not in replies], CHECK_SECONDS
            ):
                if isinstance(reply, Progress):
                    self.monitor.update(rank, reply)
                else:
                    self.monitor.started(rank)
                    replies[rank] = reply
            self._check_start()
        return self.all_started(replies)

    def _check_start(self) -> None:
        """Raise ``EngineError`` if the start hangs, after those that hang have written their stacks."""
        try:
            self.monitor.check()
        except EngineError:
            for rank in self.monitor.behind:
                if (
                    self.monitor.stage_of(rank) != FIRST_STAGE
                ):  # it would end a process without a handler
                    self._workers[rank].send_signal(signal.SIGUSR1)
            time.sleep(REASON_SECONDS)
            raise

    def broadcast(self, command: WorkerCommand) -> None:
        """Send ``command`` to every rank. Raises ``EngineDeadError`` if one is gone."""
        data = encode(command)
        for rank in range(len(self._pipes)):
            self._send(rank, data)

    def receive_result(self) -> tuple[int, WorkerReply]:
        """Collect a step from rank 0. Any other rank that replies or closes its end has failed."""
        self.broadcast(Collect())
        return next(self._receive(range(len(self._pipes))))

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._pipes[rank].send_bytes(data)
        except OSError:
            self._raise_dead(rank)

    def _receive(
        self, ranks: Sequence[int], seconds: float | None = None
    ) -> Iterator[tuple[int, WorkerReply]]:
        """Wait up to ``seconds`` for replies of ``ranks``; yield one of each rank that has replied.

        Raises if one has failed.
        """
        ready = wait([self._pipes[rank] for rank in ranks], seconds)
        for rank in ranks:
            if self._pipes[rank] not in ready:
                continue
            try:
                reply = decode_reply(self._pipes[rank].recv_bytes())
            except (EOFError, OSError):
                self._raise_dead(rank)
            if isinstance(reply, Failed):
                if (killed_rank := self._killed_rank()) is not None:
                    self._raise_dead(killed_rank)
                raise self.failure(rank, reply)
            yield rank, reply

    def _killed_rank(self) -> int | None:
        """Return the rank whose death made another one fail, or ``None``.

        Its sockets close before its process counts as ended, so the other's reply may come first.
        """
        deadline = time.monotonic() + REASON_SECONDS
        while time.monotonic() < deadline:
            for rank, worker in enumerate(self._workers):
                if worker.poll():
                    return rank
            time.sleep(0.01)
        return None

    def _raise_dead(self, rank: int) -> NoReturn:
        """Raise ``EngineDeadError`` for a worker that closed its end without a reply."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._workers[rank].wait(STOP_SECONDS)
        where = "" if self.serving else f" in stage {self.monitor.stage_of(rank)!r} of the start"
        raise EngineDeadError(
            f"the worker of rank {rank} is gone{where} (exit code {self._workers[rank].poll()}); "
            "see its output above"
        )

    def check_health(self) -> None:
        """Raise ``EngineDeadError`` if a worker has ended."""
        for rank in range(len(self._workers)):
            if self._workers[rank].poll() is not None:
                self._raise_dead(rank)

    def shutdown(self) -> None:
        """Stop the workers; kill those that do not end in time, or have not started."""
        for pipe in self._pipes if self.serving else ():
            os.set_blocking(pipe.fileno(), False)  # one that hangs reads nothing
            with contextlib.suppress(OSError):
                pipe.send_bytes(encode(Stop()))
        deadline = time.monotonic() + (STOP_SECONDS if self.serving else 0.0)
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            if worker.returncode is None:
                os.killpg(worker.pid, signal.SIGKILL)  # and the compilers that it runs
        for rank, worker in enumerate(self._workers):
            try:
                worker.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                log.error("rank %d (process %d) cannot be killed", rank, worker.pid)
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        self._spawner.shutdown()
        self._folder.cleanup()
