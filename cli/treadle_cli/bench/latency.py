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
from treadle_cli.bench.engine import about, engine_options, ids_of, params_of, workloads
from treadle_cli.bench.percentiles import spread
from treadle_cli.bench.results import About, Latency, Result, select_pass
from treadle_cli.bench.throughput import check_count
from treadle_cli.bench.workloads import Workload
from treadle_cli.flags import Options

if TYPE_CHECKING:
    from treadle.entrypoints.async_llm import AsyncLLM

__all__ = ("latency",)


@dataclass(slots=True)
class LatencyPass:
    """Times of one pass, in seconds."""

    wall: float = 0.0
    tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)


def latency(options: Options, bench: BenchConfig) -> Iterator[Result]:
    """Start one engine and yield the result of each workload."""
    given = engine_options(options, bench)
    results = _all(given, bench)
    with asyncio.Runner() as runner:
        while (result := runner.run(_next(results))) is not None:
            yield result


async def _next(results: AsyncIterator[Result]) -> Result | None:
    return await anext(results, None)


async def _all(given: dict[str, Any], bench: BenchConfig) -> AsyncIterator[Result]:
    began = time.perf_counter()
    from treadle import AsyncLLM

    llm = AsyncLLM(**given)
    try:
        await llm.start()
        facts = about(llm.info, given, bench, time.perf_counter() - began)
        for found in workloads(bench, llm.info):
            yield await measure(llm, found, bench, facts)
    finally:
        await llm.shutdown()


async def measure(llm: AsyncLLM, found: Workload, bench: BenchConfig, facts: About) -> Result:
    """Warm up, take the timed passes and report one of them."""
    params = params_of(found, bench.temperature)
    for _ in range(bench.num_iters_warmup):
        await run_pass(llm, found, params, bench)
    passes = [await run_pass(llm, found, params, bench) for _ in range(bench.num_iters)]
    walls = [p.wall for p in passes]
    best = passes[select_pass(walls, bench.pick)]
    return Result(
        kind="latency",
        workload=found.name,
        requests=len(found.prompts),
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.output_tokens,
        wall_seconds=round(best.wall, 6),
        output_tokens_per_second=round(found.output_tokens / best.wall, 2),
        prompt_tokens_per_second=round(found.prompt_tokens / best.wall, 2),
        pick=bench.pick,
        passes=[round(w, 6) for w in walls],
        about=facts,
        latency=Latency(
            ttft_ms=spread(best.ttft),
            itl_ms=spread(best.itl),
            e2e_ms=spread(best.e2e),
            concurrency=bench.max_concurrency,
            request_rate=bench.request_rate,
        ),
    )


async def run_pass(
    llm: AsyncLLM, found: Workload, params: list[SamplingParams], bench: BenchConfig
) -> LatencyPass:
    """Send every request at its time and wait for all."""
    times = LatencyPass()
    gate = asyncio.Semaphore(bench.max_concurrency or len(found.prompts))
    draw = random.Random(0)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt, one in zip(ids_of(found.prompts), params, strict=True):
            group.create_task(_request(llm, prompt, one, gate, times))
            if bench.request_rate is not None:
                await asyncio.sleep(draw.expovariate(bench.request_rate))
    times.wall = time.perf_counter() - began
    check_count(found, times.tokens)
    return times


async def _request(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, gate: asyncio.Semaphore, times: LatencyPass
) -> None:
    """One request. Its clock starts when it may start: waiting at the gate is the client's."""
    async with gate:
        began = last = time.perf_counter()
        stream = llm.generate(prompt, params.replace(output_kind="delta"))
        async with aclosing(stream):
            async for update in stream:
                now = time.perf_counter()
                count = sum(len(output.token_ids) for output in update.outputs)
                if count == 0:
                    continue
                if last == began:
                    times.ttft.append(now - began)
                    count_after_first = count - 1
                else:
                    count_after_first = count
                # Tokens that come together share the wait for them.
                times.itl += [(now - last) / count] * count_after_first
                times.tokens += count
                last = now
        times.e2e.append(time.perf_counter() - began)
