"""Workers in processes of this machine, one socket for each."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from treadle.api.types import EngineInfo
from treadle.config import EngineConfig
from treadle.errors import EngineDeadError
from treadle.processes.spawn import spawn
from treadle_worker_kit.group import WorkerGroupExecutor
from treadle_worker_kit.messages import (
    Collect,
    Failed,
    Stop,
    WorkerCommand,
    WorkerReply,
    decode_reply,
    encode,
)

__all__ = ("MultiprocExecutor",)

STOP_SECONDS = 5.0
REASON_SECONDS = 0.5


class MultiprocExecutor(WorkerGroupExecutor):
    """A worker process for each rank. The ranks meet in a file of a temporary folder."""

    def __init__(self, config: EngineConfig, host: Any) -> None:
        super().__init__(config, host)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-")

    def start(self) -> EngineInfo:
        """Start the workers and wait until all of them have loaded their shards."""
        size = self.world_size
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        for rank in range(size):
            worker, ours = spawn("treadle_executor_mp.worker:main")
            self._workers.append(worker)
            self._pipes.append(Connection(ours.detach()))
            start = self.start_command(rank, rendezvous, local_rank=rank, local_world_size=size)
            self._send(rank, encode(start))
        replies: dict[int, WorkerReply] = {}
        while len(replies) < size:
            rank, reply = self._receive([r for r in range(size) if r not in replies])
            replies[rank] = reply
        return self.all_started(replies)

    def broadcast(self, command: WorkerCommand) -> None:
        """Send ``command`` to every rank. Raises ``EngineDeadError`` if one is gone."""
        data = encode(command)
        for rank in range(len(self._pipes)):
            self._send(rank, data)

    def receive_result(self) -> tuple[int, WorkerReply]:
        """Collect a step from rank 0. Any other rank that replies or closes its end has failed."""
        self.broadcast(Collect())
        return self._receive(range(len(self._pipes)))

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._pipes[rank].send_bytes(data)
        except OSError:
            self._raise_dead(rank)

    def _receive(self, ranks: Sequence[int]) -> tuple[int, WorkerReply]:
        """Return the next reply of any of ``ranks``, and its rank. Raises if one has failed."""
        ready = wait([self._pipes[rank] for rank in ranks])
        rank = next(rank for rank in ranks if self._pipes[rank] in ready)
        try:
            reply = decode_reply(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._raise_dead(rank)
        if isinstance(reply, Failed):
            if (killed := self._killed_rank()) is not None:
                self._raise_dead(killed)
            raise reply.error(rank, serving=self.serving)
        return rank, reply

    def _killed_rank(self) -> int | None:
        """Return the rank whose death made another one fail, or ``None``.

        Its sockets close before its process counts as ended, so the other's reply may come first.
        """
        until = time.monotonic() + REASON_SECONDS
        while time.monotonic() < until:
            for rank, worker in enumerate(self._workers):
                if worker.poll():
                    return rank
            time.sleep(0.01)
        return None

    def _raise_dead(self, rank: int) -> NoReturn:
        """Raise ``EngineDeadError`` for a worker that closed its end without a reply."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._workers[rank].wait(STOP_SECONDS)
        raise EngineDeadError(
            f"the worker of rank {rank} is gone (exit code {self._workers[rank].poll()}); "
            "see its output above"
        )

    def check_health(self) -> None:
        """Raise ``EngineDeadError`` if a worker has ended."""
        for rank in range(len(self._workers)):
            if self._workers[rank].poll() is not None:
                self._raise_dead(rank)

    def shutdown(self) -> None:
        """Stop the workers; kill those that do not end in time."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(encode(Stop()))
        for worker in self._workers:
            try:
                worker.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        self._folder.cleanup()
