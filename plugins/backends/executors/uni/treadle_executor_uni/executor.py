"""The executor that runs the model in the engine's process and thread."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

import torch

from treadle.api.types import EngineInfo, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from treadle.config import EngineConfig
from treadle.errors import ConfigError, EngineDeadError, PluginLoadError
from treadle_executor_uni.start_watch import StartWatch
from treadle_worker_kit.memory import is_out_of_memory
from treadle_worker_kit.start import start_runner

if TYPE_CHECKING:
    from treadle.runner.model_runner import ModelRunner

__all__ = ("UniProcExecutor",)

log = logging.getLogger(__name__)


class UniProcExecutor:
    """An executor for one device, without worker processes.

    If a step fails, its output has an error and the engine continues, unless the device has failed.
    """

    def __init__(self, config: EngineConfig, plugins: Any) -> None:
        if config.device.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size is {config.device.tensor_parallel_size}, but executor "
                "'uni' runs one device; leave distributed_executor_backend out, or choose 'mp'"
            )
        self._config = config
        self._plugins = plugins
        self._runner: ModelRunner | None = None
        self._failed: dict[int, str] = {}
        self._order: list[int] = []
        self._failure: str | None = None

    def start(self) -> EngineInfo:
        with StartWatch(self._config.device.startup_timeout) as watch:
            self._runner = start_runner(self._config, self._plugins, announce=watch.enter)
        return self._runner.info

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._order.append(scheduler_output.id)
        try:
            self._loaded_runner.execute_model(scheduler_output)
        except Exception as error:
            self._loaded_runner.discard()
            self._failed[scheduler_output.id] = self._explain_failure(error)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> None:
        step = self._order[-1]
        if step in self._failed:
            return
        try:
            self._loaded_runner.sample_tokens(grammar_output)
        except Exception as error:
            self._loaded_runner.discard()
            self._failed[step] = self._explain_failure(error)

    def get_output(self) -> ModelRunnerOutput:
        step = self._order.pop(0)
        if step in self._failed:
            return ModelRunnerOutput(id=step, sampled_token_ids=[], error=self._failed.pop(step))
        try:
            return self._loaded_runner.get_output()
        except Exception as error:
            return ModelRunnerOutput(
                id=step, sampled_token_ids=[], error=self._explain_failure(error)
            )

    def _explain_failure(self, error: Exception) -> str:
        """Return an error message for the client. CUDA errors except out of memory are fatal."""
        if is_out_of_memory(error):
            torch.cuda.empty_cache()
            return (
                "the device ran out of memory in this step; lower max_num_batched_tokens or "
                "gpu_memory_utilization"
            )
        log.error("a step failed", exc_info=error)
        is_plugin_error = isinstance(error, PluginLoadError)
        text = (
            f"the step failed: {error if is_plugin_error else f'{type(error).__name__}: {error}'}"
        )
        if isinstance(error.__cause__ if is_plugin_error else error, torch.AcceleratorError):
            self._failure = text
        return text

    def check_health(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the device has failed: {self._failure}")

    def shutdown(self) -> None:
        if self._runner is not None and self._runner.device.type == "cuda":
            self._runner = None
            gc.collect()  # graphs and layers refer to each other; the next engine needs their memory
            torch.cuda.empty_cache()
        self._runner = None

    @property
    def _loaded_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineDeadError("the executor was not started, or has been stopped")
        return self._runner
