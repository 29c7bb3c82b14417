"""Starts one worker for each rank, sends every step to all of them, hears from rank 0."""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import msgspec

from weft import errors
from weft.config import EngineConfig
from weft.engine.plan import EngineFacts, StepEdits, StepPlan, StepResult
from weft.plugins import Host
from weft_executor_processes.wire import (
    Answer,
    Collect,
    Collected,
    Failed,
    Launch,
    Order,
    Sample,
    Started,
    Stop,
    decode_answer,
    encode,
)
from weft_executor_processes.worker import run_worker

__all__ = ("ProcessesExecutor",)

STOP_SECONDS = 5.0


class ProcessesExecutor:
    """``tensor_parallel_size`` workers of one model. Used from one thread.

    All ranks compute the same tokens, so a step needs no answer but that of rank 0. A worker that
    dies or fails takes the whole group down: the others wait for it in a collective.
    """

    def __init__(self, config: EngineConfig, host: Host) -> None:
        self._config = config
        self._host = host
        self._workers: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._serving = False
        self._folder = tempfile.TemporaryDirectory(prefix="weft-")

    def start(self) -> EngineFacts:
        size = self._config.device.tensor_parallel_size
        config = msgspec.msgpack.encode(self._config)
        plan = msgspec.msgpack.encode(self._host.plan())
        meeting = str(Path(self._folder.name) / "meeting")
        # Forking a process that has threads (torch, the server) may deadlock its child.
        context = multiprocessing.get_context("spawn")
        for rank in range(size):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=run_worker,
                args=(theirs, rank, size, config, plan, meeting),
                name=f"weft-rank-{rank}",
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        facts = [self._started(rank) for rank in range(size)]
        self._serving = True
        return facts[0]

    def _started(self, rank: int) -> EngineFacts:
        answer = self._hear(rank)
        if not isinstance(answer, Started):
            raise errors.EngineError(f"rank {rank} answered {type(answer).__name__} at start")
        return answer.facts

    def launch(self, plan: StepPlan) -> None:
        self._tell(Launch(plan))

    def sample(self, edits: StepEdits | None) -> None:
        self._tell(Sample(edits))

    def collect(self) -> StepResult:
        self._tell(Collect())
        answer = self._hear(0)
        if not isinstance(answer, Collected):
            raise errors.EngineError(f"rank 0 answered {type(answer).__name__} to a step")
        return answer.result

    def _tell(self, order: Order) -> None:
        data = encode(order)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(data)
            except OSError:
                self._lost(rank)

    def _hear(self, rank: int) -> Answer:
        """The next answer of one rank, unless another one fails meanwhile."""
        sentinels = [worker.sentinel for worker in self._workers]
        while True:
            ready = wait([*self._pipes, *sentinels])
            for other, (pipe, sentinel) in enumerate(zip(self._pipes, sentinels, strict=True)):
                if other != rank and (pipe in ready or sentinel in ready):
                    # At start the other ranks answer too, each in its turn.
                    if pipe in ready and not self._serving:
                        continue
                    self._lost(other)
            if self._pipes[rank] in ready:
                return self._read(rank)
            if sentinels[rank] in ready:
                self._lost(rank)

    def _read(self, rank: int) -> Answer:
        try:
            answer = decode_answer(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._lost(rank, heard=True)
        if isinstance(answer, Failed):
            raise self._error(rank, answer)
        return answer

    def _lost(self, rank: int, *, heard: bool = False) -> NoReturn:
        """A worker is gone, or speaks out of turn: raise what is known of the reason."""
        pipe = self._pipes[rank]
        if not heard and pipe.poll():
            self._read(rank)  # raises if it is the worker's last word
        self._workers[rank].join(STOP_SECONDS)
        code = self._workers[rank].exitcode
        raise errors.EngineDeadError(
            f"the worker of rank {rank} is gone (exit code {code}); see its output above"
        )

    def _error(self, rank: int, failed: Failed) -> errors.WeftError:
        """The worker's own error at start, where the user can mend it; later the engine is lost."""
        kind = getattr(errors, failed.kind, None)
        if not self._serving and isinstance(kind, type) and issubclass(kind, errors.WeftError):
            return kind(failed.message)
        text = f"rank {rank} failed: {failed.kind}: {failed.message}"
        return errors.EngineDeadError(text)

    def check(self) -> None:
        for rank, worker in enumerate(self._workers):
            if not worker.is_alive():
                self._lost(rank)

    def stop(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send_bytes(encode(Stop()))
            except OSError:
                continue
        for worker in self._workers:
            worker.join(STOP_SECONDS)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        self._folder.cleanup()
