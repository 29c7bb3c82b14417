"""The start of one rank: the model is loaded, its KV cache allocated, its steps captured."""

from __future__ import annotations

import torch

from treadle.api.communicators import Communicator
from treadle.config import EngineConfig
from treadle.layers import SingleRankCommunicator
from treadle.plugins import PluginManager
from treadle.runner.model_runner import LoadedModel, ModelRunner
from treadle.runner.startup import Announce, StartStages
from treadle_worker_kit.load import load_model
from treadle_worker_kit.memory import GIB, MemoryUsage, explain_out_of_memory
from treadle_worker_kit.report import option_line, stage_line

__all__ = ("start_runner",)


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
    stages = StartStages(tp_group, announce)
    loaded, usage = load_model(config, plugins, tp_group, stages)
    runner = ModelRunner(config, plugins, loaded)
    report = loaded.info.report
    if loaded.device.type == "cuda" and not config.device.enforce_eager:
        advice = "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager"
        with (
            stages.stage("graphs"),
            explain_out_of_memory(loaded.device, "capturing CUDA graphs", advice),
        ):
            report.append(_capture(runner, loaded, usage))
    report += [option_line(config, usage), stage_line(stages.seconds)]
    return runner


def _capture(runner: ModelRunner, loaded: LoadedModel, usage: MemoryUsage) -> str:
    """Capture CUDA graphs if the attention backends allow it; return a line about it."""
    if not loaded.attention.graph_safe:
        return f"graphs       none: attention {loaded.attention.names} is not graph-safe"
    free_bytes = torch.cuda.mem_get_info(loaded.device)[0]
    sizes = runner.capture()
    usage.graphs = free_bytes - torch.cuda.mem_get_info(loaded.device)[0]
    return f"graphs       {usage.graphs / GIB:8.3f} GiB: {len(sizes)} batch sizes"
