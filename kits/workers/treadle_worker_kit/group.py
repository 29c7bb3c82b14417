"""An executor with one worker for each rank, without its transport."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping

import msgspec

from treadle.api.engine import Executor
from treadle.api.step_types import EngineInfo, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from treadle.config import EngineConfig
from treadle.errors import EngineError, TreadleError
from treadle.plugins import PluginManager
from treadle_worker_kit.messages import (
    Collected,
    Failed,
    Launch,
    Sample,
    Started,
    StartWorker,
    WorkerCommand,
    WorkerReply,
)
from treadle_worker_kit.monitor import StartMonitor

__all__ = ("WorkerGroupExecutor",)

log = logging.getLogger("treadle.workers")


class WorkerGroupExecutor(Executor):
    """``tensor_parallel_size`` workers of one model. Used from one thread.

    All ranks compute the same tokens, so only rank 0 replies to a step. A worker that dies or fails
    ends the whole group: the others wait for it in a collective.

    Until all have started, a subclass passes their ``Progress`` to ``monitor`` and calls its ``check`` now
    and then. It implements ``start``, ``check_health``, ``shutdown``, ``broadcast`` and ``receive_result``.
    """

    def __init__(self, config: EngineConfig, plugins: PluginManager) -> None:
        self.config = config
        self.world_size = config.device.tensor_parallel_size
        self.serving = False
        """Whether all workers have started."""
        self.monitor = StartMonitor(self.world_size, config.device.startup_timeout)
        self._plugins = plugins

    @abstractmethod
    def broadcast(self, command: WorkerCommand) -> None:
        """Send ``command`` to every rank. May raise ``EngineError`` if one is lost."""

    @abstractmethod
    def receive_result(self) -> tuple[int, WorkerReply]:
        """Send ``Collect`` to every rank. Return the first reply, and its rank.

        Raises ``EngineDeadError`` if a rank is lost.
        """

    def start_command(
        self,
        rank: int,
        rendezvous: str,
        *,
        local_rank: int,
        local_world_size: int,
        device: str | None = None,
    ) -> StartWorker:
        """Return the first command of a worker. ``device`` replaces the option of that name."""
        config = self.config
        if device is not None:
            device_config = msgspec.structs.replace(config.device, device=device)
            config = msgspec.structs.replace(config, device=device_config)
        selection = self._plugins.selection()
        return StartWorker(
            rank, self.world_size, config, selection, rendezvous, local_rank, local_world_size
        )

    def failure(self, rank: int, reply: Failed) -> TreadleError:
        """Return the error for a rank that has failed; before all have started, its stage is logged."""
        if self.serving:
            return reply.error(rank, stage=None)
        stage = self.monitor.stage_of(rank)
        log.error("rank %d failed in stage %r of the start: %s", rank, stage, reply.message)
        return reply.error(rank, stage=stage)

    def all_started(self, replies: Mapping[int, WorkerReply]) -> EngineInfo:
        """Note that every rank has replied to its ``StartWorker``. Return the facts of rank 0."""
        for rank, reply in replies.items():
            if not isinstance(reply, Started):
                raise _unexpected(rank, reply, "Started")
        self.serving = True
        first = replies[0]
        if not isinstance(first, Started):
            raise _unexpected(0, first, "Started")
        return first.info

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Enqueue one step on every rank."""
        self.broadcast(Launch(scheduler_output))

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> None:
        """Complete the held step that was launched last."""
        self.broadcast(Sample(grammar_output))

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the oldest step that was not collected yet."""
        rank, reply = self.receive_result()
        if rank or not isinstance(reply, Collected):
            raise _unexpected(rank, reply, "Collected from rank 0")
        return reply.result


def _unexpected(rank: int, reply: WorkerReply, expected: str) -> EngineError:
    return EngineError(f"rank {rank} answered {type(reply).__name__}; expected {expected}")
