"""All requests at once, through ``LLM.generate``: how many tokens per second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from treadle.api.sampling_params import SamplingParams
from treadle.errors import EngineError
from treadle_cli.bench.config import BenchConfig
from treadle_cli.bench.engine import engine_options, ids_of, params_of, run_info, workloads
from treadle_cli.bench.results import Result, RunInfo, select_iteration
from treadle_cli.bench.workloads import Workload
from treadle_cli.flags import Options

if TYPE_CHECKING:
    from treadle.entrypoints.llm import LLM

__all__ = ("throughput",)


def throughput(options: Options, bench: BenchConfig) -> Iterator[Result]:
    """Start one engine and yield the result of each workload."""
    engine_args = engine_options(options, bench)
    start_time = time.perf_counter()
    from treadle import LLM

    with LLM(**engine_args) as llm:
        info = run_info(llm.info, engine_args, bench, time.perf_counter() - start_time)
        for workload in workloads(bench, llm.info):
            yield measure(llm, workload, bench, info)


def measure(llm: LLM, workload: Workload, bench: BenchConfig, info: RunInfo) -> Result:
    """Run the warm-up and timed iterations of a workload and report one of them."""
    params = params_of(workload, bench.temperature)
    for _ in range(bench.num_iters_warmup):
        run_iteration(llm, workload, params)
    wall_times = [run_iteration(llm, workload, params) for _ in range(bench.num_iters)]
    wall = wall_times[select_iteration(wall_times, bench.pick)]
    return Result(
        kind="throughput",
        workload=workload.name,
        requests=len(workload.prompts),
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        wall_seconds=round(wall, 6),
        output_tokens_per_second=round(workload.output_tokens / wall, 2),
        prompt_tokens_per_second=round(workload.prompt_tokens / wall, 2),
        pick=bench.pick,
        iter_seconds=[round(w, 6) for w in wall_times],
        run_info=info,
    )


def run_iteration(llm: LLM, workload: Workload, params: list[SamplingParams]) -> float:
    """Run all requests of a workload once and return the seconds until all outputs are complete."""
    prompts = ids_of(workload.prompts)
    start_time = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    wall = time.perf_counter() - start_time
    num_tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
    check_count(workload, num_tokens)
    return wall


def check_count(workload: Workload, num_tokens: int) -> None:
    """Raise ``EngineError`` if an iteration lost tokens: an early end must not count as speed."""
    if num_tokens != workload.output_tokens:
        raise EngineError(
            f"the workload {workload.name} asks for {workload.output_tokens} tokens and the engine generated {num_tokens}; "
            "the figures would be wrong, so none are printed"
        )
