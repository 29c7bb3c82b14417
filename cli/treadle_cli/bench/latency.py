"""Requests as they arrive at a server, through ``AsyncLLM``: how long a client waits."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treadle.api.sampling_params import SamplingParams
from treadle_cli.bench.config import BenchConfig
from treadle_cli.bench.engine import engine_options, ids_of, params_of, run_info, workloads
from treadle_cli.bench.percentiles import summarize
from treadle_cli.bench.results import Latency, Result, RunInfo, select_iteration
from treadle_cli.bench.throughput import check_count
from treadle_cli.bench.workloads import Workload
from treadle_cli.flags import Options

if TYPE_CHECKING:
    from treadle.entrypoints.async_llm import AsyncLLM

__all__ = ("latency",)


@dataclass(slots=True)
class IterationTimes:
    """Times of one iteration, in seconds."""

    wall: float = 0.0
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)


def latency(options: Options, bench: BenchConfig) -> Iterator[Result]:
    """Start one engine and yield the result of each workload."""
    engine_args = engine_options(options, bench)
    results = _all(engine_args, bench)
    with asyncio.Runner() as runner:
        while (result := runner.run(_next(results))) is not None:
            yield result


async def _next(results: AsyncIterator[Result]) -> Result | None:
    return await anext(results, None)


async def _all(engine_args: dict[str, Any], bench: BenchConfig) -> AsyncIterator[Result]:
    start_time = time.perf_counter()
    from treadle import AsyncLLM

    llm = AsyncLLM(**engine_args)
    try:
        await llm.start()
        info = run_info(llm.info, engine_args, bench, time.perf_counter() - start_time)
        for workload in workloads(bench, llm.info):
            yield await measure(llm, workload, bench, info)
    finally:
        await llm.shutdown()


async def measure(llm: AsyncLLM, workload: Workload, bench: BenchConfig, info: RunInfo) -> Result:
    """Run the warm-up and timed iterations of a workload and report one of them."""
    params = params_of(workload, bench.temperature)
    for _ in range(bench.num_iters_warmup):
        await run_iteration(llm, workload, params, bench)
    iterations = [await run_iteration(llm, workload, params, bench) for _ in range(bench.num_iters)]
    wall_times = [times.wall for times in iterations]
    best = iterations[select_iteration(wall_times, bench.pick)]
    return Result(
        kind="latency",
        workload=workload.name,
        requests=len(workload.prompts),
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        wall_seconds=round(best.wall, 6),
        output_tokens_per_second=round(workload.output_tokens / best.wall, 2),
        prompt_tokens_per_second=round(workload.prompt_tokens / best.wall, 2),
        pick=bench.pick,
        iter_seconds=[round(w, 6) for w in wall_times],
        run_info=info,
        latency=Latency(
            ttft_ms=summarize(best.ttft),
            itl_ms=summarize(best.itl),
            e2e_ms=summarize(best.e2e),
            concurrency=bench.max_concurrency,
            request_rate=bench.request_rate,
        ),
    )


async def run_iteration(
    llm: AsyncLLM, workload: Workload, params: list[SamplingParams], bench: BenchConfig
) -> IterationTimes:
    """Send every request at its time and wait for all."""
    times = IterationTimes()
    gate = asyncio.Semaphore(bench.max_concurrency or len(workload.prompts))
    draw = random.Random(0)
    start_time = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt, request_params in zip(ids_of(workload.prompts), params, strict=True):
            group.create_task(_request(llm, prompt, request_params, gate, times))
            if bench.request_rate is not None:
                await asyncio.sleep(draw.expovariate(bench.request_rate))
    times.wall = time.perf_counter() - start_time
    check_count(workload, times.tokens)
    return times


async def _request(
    llm: AsyncLLM,
    prompt: Any,
    params: SamplingParams,
    gate: asyncio.Semaphore,
    times: IterationTimes,
) -> None:
    """Send one request. Time spent waiting for ``max_concurrency`` is not measured."""
    async with gate:
        start_time = last = time.perf_counter()
        stream = llm.generate(prompt, params.replace(output_kind="delta"))
        async with aclosing(stream):
            async for update in stream:
                now = time.perf_counter()
                count = sum(len(output.token_ids) for output in update.outputs)
                if count == 0:
                    continue
                if last == start_time:
                    times.ttft.append(now - start_time)
                    count_after_first = count - 1
                else:
                    count_after_first = count
                # Tokens that come together share the wait for them.
                times.itl += [(now - last) / count] * count_after_first
                times.tokens += count
                last = now
        times.e2e.append(time.perf_counter() - start_time)
