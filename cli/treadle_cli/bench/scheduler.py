"""What a step costs on the host: the real engine loop around a runner that computes nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from statistics import mean, median

import msgspec

from treadle.api.requests import EngineRequest
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import CacheGroup
from treadle.api.types import EngineFacts, Executor, StepEdits, StepPlan, StepResult
from treadle.config import EngineConfig, from_options
from treadle.engine.core import EngineCore
from treadle.plugins import PluginManager

__all__ = ("SIZES", "HostCost", "host_cost")

SIZES = (1, 32, 256, 1024)
PROMPT = 64  # tokens of each sequence before the measured decode steps
WARM = 20
PAGE_SIZE = 16


class HostCost(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of one decode step outside of the device, over ``steps`` steps."""

    kind: str = "scheduler"
    running: int
    steps: int
    median_ms: float
    mean_ms: float
    p99_ms: float


class NoRunner:
    """An executor that samples token 7 for every row, at once."""

    def __init__(self, config: EngineConfig) -> None:
        self._slots = config.scheduler.max_num_seqs
        self._queue: deque[StepResult] = deque()

    def start(self) -> EngineFacts:
        group = CacheGroup("full", None, self._slots * 128 + 1, 28, 1 << 16)
        return EngineFacts(
            model="none", architecture="none", dtype="bfloat16", device="none", vocab_size=32000,
            max_model_len=2048, page_size=PAGE_SIZE, groups=[group], depth=1, eos_ids=[2],
        )  # fmt: skip

    def launch(self, plan: StepPlan) -> None:
        self._queue.append(StepResult(plan.id, [7] * sum(plan.samples)))

    def sample(self, edits: StepEdits | None) -> None:
        pass

    def collect(self) -> StepResult:
        return self._queue.popleft()

    def check(self) -> None:
        pass

    def stop(self) -> None:
        pass


class _Host(PluginManager):
    """The installed plugins, but for the executor."""

    def executor(self, name: str, config: EngineConfig) -> Executor:
        return NoRunner(config)


def host_cost(steps: int = 400) -> Iterator[HostCost]:
    """One line for each number of running sequences."""
    for running in SIZES:
        config = from_options(
            max_num_seqs=running,
            max_num_batched_tokens=running * PROMPT,
            enable_prefix_caching=False,
            max_queue=running,
        )
        core = EngineCore(config, _Host(config.plugins))
        params = SamplingParams(max_tokens=WARM + steps + 8, ignore_eos=True)
        for i in range(running):
            core.add(EngineRequest(str(i), [5] * PROMPT, params, time.monotonic()))
        for _ in range(WARM):
            core.step()
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            core.step()
            taken.append(1e3 * (time.perf_counter() - began))
        core.close()
        yield HostCost(
            running=running,
            steps=steps,
            median_ms=round(median(taken), 4),
            mean_ms=round(mean(taken), 4),
            p99_ms=round(sorted(taken)[int(0.99 * (steps - 1))], 4),
        )
