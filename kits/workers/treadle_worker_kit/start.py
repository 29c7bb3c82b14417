"""The start of one rank: the model is loaded, its KV cache allocated, its steps captured."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from tqdm import tqdm

from treadle.api.communicators import Communicator
from treadle.config import EngineConfig
from treadle.plugins import PluginManager
from treadle.runner.model_runner import LoadedModel, ModelRunner
from treadle_layers_kit import SingleRankCommunicator
from treadle_worker_kit.download import DownloadProgress
from treadle_worker_kit.load import load_model
from treadle_worker_kit.memory import MemoryUsage, explain_out_of_memory
from treadle_worker_kit.report import memory_lines, stage_line
from treadle_worker_kit.stages import Announce, StartStages
from treadle_worker_kit.warm_up import run_step, warm_up_steps

__all__ = ("start_runner",)

MAX_PROMPT_TOKENS = 512
"""Tokens up to which steps are captured for prompts, whatever ``max_num_seqs`` is."""


def start_runner(
    config: EngineConfig,
    plugins: PluginManager,
    tp_group: Communicator | None = None,
    announce: Announce | None = None,
) -> ModelRunner:
    """Build and load the model, allocate the KV cache, capture CUDA graphs.

    ``announce`` is told each stage of it. Without ``tp_group`` there is one rank.
    """
    tp_group = tp_group or SingleRankCommunicator()
    stages = StartStages(tp_group, announce and DownloadProgress(announce).enter)
    loaded, usage = load_model(config, plugins, tp_group, stages)
    report = loaded.info.report
    with stages.stage("sampler"):
        runner = ModelRunner(config, plugins, loaded)
        kernels = runner.sampler_kernels
        stages.check_alike("kernels of the sampler", *kernels.values())
    if kernels:
        report.append(
            "Kernels of the sampler: " + ", ".join(f"{op} by {kernels[op]}" for op in kernels) + "."
        )
    if loaded.device.type == "cuda" and not config.device.enforce_eager:
        advice = "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager"
        with (
            stages.stage("graphs"),
            explain_out_of_memory(loaded.device, "capturing CUDA graphs", advice),
        ):
            report += _capture(runner, loaded, config, stages, usage)
    report[:0] = memory_lines(config, loaded.info, usage)
    report.append(stage_line(stages.seconds))
    return runner


def _capture(
    runner: ModelRunner,
    loaded: LoadedModel,
    config: EngineConfig,
    stages: StartStages,
    usage: MemoryUsage,
) -> list[str]:
    """Capture CUDA graphs, or return a sentence that the attention backends do not allow it."""
    if not all(group.graph_safe for group in loaded.attention):
        return [f"There are no CUDA graphs: attention {loaded.info.attention} is not graph-safe."]
    limits = config.scheduler
    sizes = bucket_sizes(
        max(limits.max_num_seqs, min(MAX_PROMPT_TOKENS, limits.max_num_batched_tokens))
    )
    free_bytes = torch.cuda.mem_get_info(loaded.device)[0]
    graphs = runner.create_graphs()
    for rows in tqdm(sizes[::-1], desc="Capturing CUDA graphs", unit="size", leave=False):
        stages.step(f"{rows} rows")
        # First each rank alone, so that no kernel waits on a device for a rank that is still compiling.
        with stages.dry_run() as compiles:
            if compiles:
                graphs.warm_up(rows)
        graphs.warm_up(rows)
        stages.meet()
        graphs.capture(rows)
    usage.graphs = free_bytes - torch.cuda.mem_get_info(loaded.device)[0]
    runner.info = replace(runner.info, max_graph_tokens=sizes[-1])
    stages.step("prompts")
    for step in warm_up_steps(limits, runner.info):
        with stages.dry_run() as compiles:
            if compiles:
                run_step(runner, step)
        stages.meet()
        run_step(runner, step)
    return []


def bucket_sizes(max_size: int) -> list[int]:
    """Return the batch sizes to capture, denser where padding would cost more."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    sizes += range(576, max_size + 64, 64)
    return [*(size for size in sizes if size < max_size), max_size]
