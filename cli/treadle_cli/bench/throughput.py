"""All requests at once, through ``LLM.generate``: how many tokens per second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from treadle.api.sampling_params import SamplingParams
from treadle.errors import EngineError
from treadle_cli.bench.config import BenchConfig
from treadle_cli.bench.engine import about, engine_options, ids_of, params_of, workloads
from treadle_cli.bench.results import About, Result, select_pass
from treadle_cli.bench.workloads import Workload
from treadle_cli.flags import Options

if TYPE_CHECKING:
    from treadle.entrypoints.llm import LLM

__all__ = ("throughput",)


def throughput(options: Options, bench: BenchConfig) -> Iterator[Result]:
    """Start one engine and yield the result of each workload."""
    given = engine_options(options, bench)
    began = time.perf_counter()
    from treadle import LLM

    with LLM(**given) as llm:
        facts = about(llm.info, given, bench, time.perf_counter() - began)
        for found in workloads(bench, llm.info):
            yield measure(llm, found, bench, facts)


def measure(llm: LLM, found: Workload, bench: BenchConfig, facts: About) -> Result:
    """Warm up, take the timed passes and report one of them."""
    params = params_of(found, bench.temperature)
    for _ in range(bench.num_iters_warmup):
        run_pass(llm, found, params)
    walls = [run_pass(llm, found, params) for _ in range(bench.num_iters)]
    wall = walls[select_pass(walls, bench.pick)]
    return Result(
        kind="throughput",
        workload=found.name,
        requests=len(found.prompts),
        prompt_tokens=found.prompt_tokens,
        output_tokens=found.output_tokens,
        wall_seconds=round(wall, 6),
        output_tokens_per_second=round(found.output_tokens / wall, 2),
        prompt_tokens_per_second=round(found.prompt_tokens / wall, 2),
        pick=bench.pick,
        passes=[round(w, 6) for w in walls],
        about=facts,
    )


def run_pass(llm: LLM, found: Workload, params: list[SamplingParams]) -> float:
    """Seconds from handing the requests over to having all outputs."""
    prompts = ids_of(found.prompts)
    began = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    wall = time.perf_counter() - began
    made = sum(len(output.token_ids) for result in results for output in result.outputs)
    check_count(found, made)
    return wall


def check_count(found: Workload, made: int) -> None:
    """A pass that lost tokens, by an error or an early end, must not count as a fast one."""
    if made != found.output_tokens:
        raise EngineError(
            f"the workload {found.name} asks for {found.output_tokens} tokens and the engine made {made}; "
            "the figures would be wrong, so none are printed"
        )
