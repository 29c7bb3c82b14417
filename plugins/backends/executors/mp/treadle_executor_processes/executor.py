"""Starts one worker for each rank, sends every step to all of them, hears from rank 0."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from treadle import errors
from treadle.api.step_types import EngineFacts, StepEdits, StepPlan, StepResult
from treadle.config import EngineConfig
from treadle.plugins import PluginManager
from treadle.processes.spawn import spawn
from treadle.runner.worker_messages import (
    Answer,
    Collect,
    Collected,
    Failed,
    Launch,
    Order,
    Sample,
    Start,
    Started,
    Stop,
    decode_answer,
    encode,
)

__all__ = ("ProcessesExecutor",)

STOP_SECONDS = 5.0
REASON_SECONDS = 0.5


class ProcessesExecutor:
    """``tensor_parallel_size`` workers of one model. Used from one thread.

    All ranks compute the same tokens, so a step needs no answer but that of rank 0. A worker that
    dies or fails takes the whole group down: the others wait for it in a collective.
    """

    def __init__(self, config: EngineConfig, host: PluginManager) -> None:
        self._config = config
        self._host = host
        self._workers: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._serving = False
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-")

    def start(self) -> EngineFacts:
        size = self._config.device.tensor_parallel_size
        plan = self._host.selection()
        meeting = str(Path(self._folder.name) / "meeting")
        for rank in range(size):
            worker, ours = spawn("treadle_executor_processes.worker:main")
            self._workers.append(worker)
            self._pipes.append(Connection(ours.detach()))
            self._tell(
                rank, Start(rank, size, self._config, plan, meeting, device=rank, neighbours=size)
            )
        facts: dict[int, EngineFacts] = {}
        while len(facts) < size:
            answer, rank = self._hear([r for r in range(size) if r not in facts])
            if not isinstance(answer, Started):
                raise errors.EngineError(f"rank {rank} answered {type(answer).__name__} at start")
            facts[rank] = answer.facts
        self._serving = True
        return facts[0]

    def launch(self, plan: StepPlan) -> None:
        self._tell_all(Launch(plan))

    def sample(self, edits: StepEdits | None) -> None:
        self._tell_all(Sample(edits))

    def collect(self) -> StepResult:
        self._tell_all(Collect())
        # Only rank 0 answers; another one that says something, or closes its end, has failed.
        answer, rank = self._hear(range(len(self._pipes)))
        if rank or not isinstance(answer, Collected):
            raise errors.EngineError(f"rank {rank} answered {type(answer).__name__} to a step")
        return answer.result

    def _tell_all(self, order: Order) -> None:
        data = encode(order)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(data)
            except OSError:
                self._lost(rank)

    def _tell(self, rank: int, order: Order) -> None:
        try:
            self._pipes[rank].send_bytes(encode(order))
        except OSError:
            self._lost(rank)

    def _hear(self, ranks: Sequence[int]) -> tuple[Answer, int]:
        """The next answer of any of these ranks. Raises for one that has failed."""
        ready = wait([self._pipes[rank] for rank in ranks])
        rank = next(rank for rank in ranks if self._pipes[rank] in ready)
        return self._read(rank), rank

    def _read(self, rank: int) -> Answer:
        try:
            answer = decode_answer(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._lost(rank)
        if isinstance(answer, Failed):
            if (reason := self._killed()) is not None:
                self._lost(reason)
            raise answer.error(rank, serving=self._serving)
        return answer

    def _killed(self) -> int | None:
        """The rank that made another one fail by its end.

        Its sockets are closed before it counts as ended, so the other may be heard first.
        """
        until = time.monotonic() + REASON_SECONDS
        while time.monotonic() < until:
            for rank, worker in enumerate(self._workers):
                if worker.poll():
                    return rank
            time.sleep(0.01)
        return None

    def _lost(self, rank: int) -> NoReturn:
        """A worker has closed its end without a word."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._workers[rank].wait(STOP_SECONDS)
        raise errors.EngineDeadError(
            f"the worker of rank {rank} is gone (exit code {self._workers[rank].poll()}); "
            "see its output above"
        )

    def check(self) -> None:
        for rank in range(len(self._workers)):
            if self._workers[rank].poll() is not None:
                self._lost(rank)

    def stop(self) -> None:
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
