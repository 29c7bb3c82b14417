"""The worker: runs one rank of a model and executes the commands of an executor."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from treadle.api.attention import KernelRequest
from treadle.api.step_types import EngineFacts, StepResult
from treadle.errors import EngineError, TreadleError
from treadle.plugins import Host
from treadle.runner.collective import TorchCollective
from treadle.runner.device import describe, pick_device
from treadle.runner.model_runner import ModelRunner
from treadle.runner.worker_messages import Collect, Failed, Launch, Order, Sample, Start, Stop

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ("Rank", "failed")

log = logging.getLogger("treadle.runner")


class Rank:
    """One rank of a model on its device. One per process; use it from one thread."""

    def __init__(self, start: Start, store: Store) -> None:
        """Connect to the other ranks through ``store``, then build and load the model."""
        config = start.config
        host = Host.from_plan(start.plan, config.plugins)
        device = pick_device(config.device.device, start.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif config.device.threads is None:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // start.neighbours))
        request = KernelRequest(describe(device), "bfloat16", {"ranks": start.size})
        kernel = host.kernel("all_reduce", request)
        self._ranks = TorchCollective(start.rank, start.size, device, store, kernel=kernel)
        self._runner = ModelRunner(config, host, self._ranks)

    @property
    def facts(self) -> EngineFacts:
        return self._runner.facts

    def obey(self, order: Order) -> StepResult | None:
        """Execute a command after ``StartWorker``. Only ``Collect`` has a result.

        After ``Stop`` or an error the worker cannot be used, since the other ranks wait for it.
        """
        match order:
            case Launch(plan):
                self._runner.launch(plan)
            case Sample(edits):
                self._runner.sample(edits)
            case Collect():
                return self._runner.collect()
            case Stop():
                self._ranks.close()
            case Start():
                raise EngineError("the worker has already been started")
        return None


def failed(error: BaseException) -> Failed:
    """Return the reply of a failed worker. Logs the traceback unless it is a ``TreadleError``."""
    if not isinstance(error, TreadleError):
        log.error("the worker failed", exc_info=error)
    return Failed.of(error)
