"""The executor that runs the model in the engine's process and thread."""

from __future__ import annotations

import logging

import torch

from treadle.api.step_types import EngineFacts, StepEdits, StepPlan, StepResult
from treadle.config import EngineConfig
from treadle.errors import ConfigError, EngineDeadError, PluginLoadError
from treadle.plugins import PluginManager
from treadle.runner.memory import lacks_memory
from treadle.runner.model_runner import ModelRunner

__all__ = ("InlineExecutor",)

log = logging.getLogger("treadle.runner")


class InlineExecutor:
    """An executor for one device, without worker processes.

    If a step fails, its output has an error and the engine continues, unless the device has failed.
    """

    def __init__(self, config: EngineConfig, host: PluginManager) -> None:
        if config.device.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size is {config.device.tensor_parallel_size}, but executor "
                "'inline' runs one device; choose executor='processes'"
            )
        self._config = config
        self._host = host
        self._runner: ModelRunner | None = None
        self._failed: dict[int, str] = {}
        self._order: list[int] = []
        self._dead: str | None = None

    def start(self) -> EngineFacts:
        self._runner = ModelRunner(self._config, self._host)
        return self._runner.facts

    def launch(self, plan: StepPlan) -> None:
        self._order.append(plan.id)
        try:
            self._started.launch(plan)
        except Exception as error:
            self._started.forget()
            self._failed[plan.id] = self._explain(error)

    def sample(self, edits: StepEdits | None) -> None:
        step = self._order[-1]
        if step in self._failed:
            return
        try:
            self._started.sample(edits)
        except Exception as error:
            self._started.forget()
            self._failed[step] = self._explain(error)

    def collect(self) -> StepResult:
        step = self._order.pop(0)
        if step in self._failed:
            return StepResult(id=step, tokens=[], error=self._failed.pop(step))
        try:
            return self._started.collect()
        except Exception as error:
            return StepResult(id=step, tokens=[], error=self._explain(error))

    def _explain(self, error: Exception) -> str:
        """Return an error message for the client. CUDA errors except out of memory are fatal."""
        if lacks_memory(error):
            torch.cuda.empty_cache()
            return (
                "the device ran out of memory in this step; lower max_num_batched_tokens or "
                "memory_fraction"
            )
        log.error("a step failed", exc_info=error)
        named = isinstance(error, PluginLoadError)
        text = f"the step failed: {error if named else f'{type(error).__name__}: {error}'}"
        if isinstance(error.__cause__ if named else error, torch.AcceleratorError):
            self._dead = text
        return text

    def check(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the device has failed: {self._dead}")

    def stop(self) -> None:
        self._runner = None

    @property
    def _started(self) -> ModelRunner:
        if self._runner is None:
            raise EngineDeadError("the executor was not started, or has been stopped")
        return self._runner
