"""One rank of a model: builds its shard and executes the commands of an executor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from treadle.api.step_types import EngineInfo, ModelRunnerOutput
from treadle.errors import EngineError, TreadleError
from treadle.plugins import PluginManager
from treadle_worker_kit.communicator import START_TIMEOUT, TorchCommunicator, choose_communicator
from treadle_worker_kit.device import pick_device
from treadle_worker_kit.messages import (
    Collect,
    Failed,
    Launch,
    Progress,
    Sample,
    StartWorker,
    Stop,
    WorkerCommand,
)
from treadle_worker_kit.start import start_runner

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("START_TIMEOUT", "Worker", "failure_reply")

log = logging.getLogger("treadle.workers")


class StartProgress:
    """Reports the stage that a start is in, and whether this rank waits for the others."""

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self._report = report
        self._stage = ""

    def enter(self, stage: str) -> None:
        self._stage = stage
        self._report(Progress(stage))

    def wait(self, is_waiting: bool) -> None:
        self._report(Progress(self._stage, is_waiting))


class Worker:
    """A shard of a model on its device. The only one of its process; used from one thread."""

    def __init__(
        self, start: StartWorker, store: Store, report: Callable[[Progress], None]
    ) -> None:
        """Join the other ranks through ``store``, build and load the model.

        ``report`` gets each stage of it. Raises what ``start_runner`` raises.
        """
        config = start.config
        progress = StartProgress(report)
        progress.enter("plugins")
        plugins = PluginManager.from_selection(start.plan, config.plugins)
        device = pick_device(config.device.device, start.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif config.device.cpu_threads is None:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // start.local_world_size))
        progress.enter("process group")
        self._base = TorchCommunicator(start.rank, start.world_size, device, store, progress.wait)
        progress.enter("communicator")
        communicator = choose_communicator(plugins, self._base, device)
        self._runner = start_runner(config, plugins, communicator, progress.enter)

    @property
    def info(self) -> EngineInfo:
        """What the scheduler must know."""
        return self._runner.info

    def execute(self, command: WorkerCommand) -> ModelRunnerOutput | None:
        """Execute a command after ``StartWorker``. Return the result of ``Collect``, else ``None``.

        After ``Stop`` and after an error nothing may follow: the other ranks wait for this one.
        """
        match command:
            case Launch(scheduler_output):
                self._runner.execute_model(scheduler_output)
            case Sample(grammar_output):
                self._runner.sample_tokens(grammar_output)
            case Collect():
                return self._runner.get_output()
            case Stop():
                self._base.close()
            case StartWorker():
                raise EngineError("a worker got StartWorker twice; it starts once")
        return None


def failure_reply(error: BaseException) -> Failed:
    """Return the reply of a worker that cannot continue.

    Errors that are not in ``treadle.errors`` are logged with their traceback.
    """
    if not isinstance(error, TreadleError):
        log.error("the worker failed", exc_info=error)
    return Failed.of(error)
