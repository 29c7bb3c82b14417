"""The start of one rank: the model is loaded, its KV cache allocated, its steps captured."""

from __future__ import annotations

from contextlib import closing

from treadle.api.communicators import Communicator
from treadle.api.devices import device_info
from treadle.config import EngineConfig
from treadle.plugins import PluginManager
from treadle.runner.model_runner import ModelRunner
from treadle_layers_kit import SingleRankCommunicator
from treadle_worker_kit.capture import capture_graphs
from treadle_worker_kit.compilations import Compilations
from treadle_worker_kit.decode_steps import DecodeSteps
from treadle_worker_kit.download import DownloadProgress
from treadle_worker_kit.garbage import without_collections
from treadle_worker_kit.load import load_model
from treadle_worker_kit.memory import explain_out_of_memory
from treadle_worker_kit.report import memory_lines, stage_line
from treadle_worker_kit.sampler_kernels import install_sampler_kernels, sampling_in_vain
from treadle_worker_kit.stages import Announce, StartStages
from treadle_worker_kit.warm_up import run_step, warm_up_steps

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
    stages = StartStages(tp_group, announce and DownloadProgress(announce).enter)
    with without_collections(), closing(stages.compiler):
        return _start_runner(config, plugins, tp_group, stages)


def _start_runner(
    config: EngineConfig, plugins: PluginManager, tp_group: Communicator, stages: StartStages
) -> ModelRunner:
    steps = DecodeSteps(plugins)
    loaded, usage = load_model(config, plugins, tp_group, stages, steps.plan)
    report = loaded.info.report
    with stages.stage("sampler"):
        runner = ModelRunner(config, plugins, loaded)
        device = device_info(loaded.device)
        kernels = install_sampler_kernels(runner.sampler, plugins, device, loaded.info.dtype)
        stages.check_alike("kernels of the sampler", *kernels.values())
    if kernels:
        report.append(
            "Kernels of the sampler: " + ", ".join(f"{op} by {kernels[op]}" for op in kernels) + "."
        )
    report += steps.install(runner, loaded, config)
    if loaded.device.type == "cuda":
        with stages.ahead() as compiles, sampling_in_vain(runner.sampler):
            for step in warm_up_steps(config.scheduler, runner.info) if compiles else ():
                run_step(runner, step)
        advice = "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager"
        if not config.device.enforce_eager:
            with (
                stages.stage("graphs"),
                explain_out_of_memory(loaded.device, "capturing CUDA graphs", advice),
            ):
                report += capture_graphs(runner, loaded, config.scheduler, stages, usage)
        with (
            stages.stage("warm-up"),
            explain_out_of_memory(loaded.device, "running the first steps", advice),
        ):
            for step in warm_up_steps(config.scheduler, runner.info):
                with stages.dry_run() as compiles:
                    if compiles:
                        run_step(runner, step)
                stages.meet()
                run_step(runner, step)
        stages.compiler.close()
        runner.count_compilations = Compilations().count
    report[:0] = memory_lines(config, loaded.info, usage)
    report.append(stage_line(stages.seconds))
    return runner
