"""The cost of a step on the CPU side: the real engine loop around a runner that computes nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from statistics import mean, median
from typing import Any, TypeVar

import msgspec

from treadle.api.kinds import EXECUTORS
from treadle.api.plugin_kind import PluginKind
from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import KVCacheGroup
from treadle.api.types import (
    EngineInfo,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from treadle.config import EngineConfig, from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager

__all__ = ("BATCH_SIZES", "SchedulerCost", "measure_step_cost")

T = TypeVar("T")
BATCH_SIZES = (1, 32, 256, 1024)
PROMPT_LEN = 64  # tokens of each sequence before the measured decode steps
NUM_WARMUP_STEPS = 20
PAGE_SIZE = 16


class SchedulerCost(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one decode step on the CPU side, over ``steps`` steps."""

    kind: str = "scheduler"
    running: int
    steps: int
    median_ms: float
    mean_ms: float
    p99_ms: float


class NullExecutor:
    """An executor that samples token 7 for every row, at once."""

    def __init__(self, config: EngineConfig) -> None:
        self._slots = config.scheduler.max_num_seqs
        self._queue: deque[ModelRunnerOutput] = deque()

    def start(self) -> EngineInfo:
        group = KVCacheGroup("full", None, self._slots * 128 + 1, 28, 1 << 16)
        return EngineInfo(
            model="none", architecture="none", dtype="bfloat16", device="none", vocab_size=32000,
            max_model_len=2048, page_size=PAGE_SIZE, kv_cache_groups=[group], num_async_steps=1, eos_token_ids=[2],
        )  # fmt: skip

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._queue.append(
            ModelRunnerOutput(scheduler_output.id, [7] * sum(scheduler_output.needs_sampling))
        )

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> None:
        pass

    def get_output(self) -> ModelRunnerOutput:
        return self._queue.popleft()

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class _Plugins(PluginManager):
    """The installed plugins, except that the executor runs no model."""

    def create_guarded(self, kind: PluginKind[T], key: str, **arguments: Any) -> T:
        if kind is EXECUTORS:
            executor: Any = NullExecutor(arguments["config"])
            return self.guarded(kind, key, executor)  # type: ignore[no-any-return]
        return super().create_guarded(kind, key, **arguments)


def measure_step_cost(steps: int = 400) -> Iterator[SchedulerCost]:
    """One line for each number of running sequences."""
    for running in BATCH_SIZES:
        config = from_options(
            max_num_seqs=running,
            max_num_batched_tokens=running * PROMPT_LEN,
            enable_prefix_caching=False,
            max_num_queued_reqs=running,
        )
        core = EngineCore(config, _Plugins(config.plugins))
        params = SamplingParams(max_tokens=NUM_WARMUP_STEPS + steps + 8, ignore_eos=True)
        for i in range(running):
            core.add_request(EngineRequest(str(i), [5] * PROMPT_LEN, params, time.monotonic()))
        for _ in range(NUM_WARMUP_STEPS):
            core.step()
        step_ms = []
        for _ in range(steps):
            start_time = time.perf_counter()
            core.step()
            step_ms.append(1e3 * (time.perf_counter() - start_time))
        core.close()
        yield SchedulerCost(
            running=running,
            steps=steps,
            median_ms=round(median(step_ms), 4),
            mean_ms=round(mean(step_ms), 4),
            p99_ms=round(sorted(step_ms)[int(0.99 * (steps - 1))], 4),
        )
