"""Options, workloads and description of the engine that is measured."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import treadle
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo
from treadle.config import SchedulerConfig
from treadle.errors import ConfigError
from treadle_cli.bench.config import BenchConfig
from treadle_cli.bench.results import RunInfo
from treadle_cli.bench.shapes import shape_folder
from treadle_cli.bench.workloads import Workload, clip_to_vocab, workload
from treadle_cli.flags import ENGINE, Options

__all__ = ("engine_options", "params_of", "run_info", "workloads")


def engine_options(options: Options, bench: BenchConfig) -> dict[str, Any]:
    """Return the engine's options. The prefix cache is off unless the user sets it.

    Iterations repeat their prompts, and a cached prompt is not computed.
    """
    defaults: dict[str, Any] = {"enable_prefix_caching": False}
    if "custom" in bench.workload:
        defaults["max_num_queued_reqs"] = max(
            SchedulerConfig().max_num_queued_reqs, bench.num_prompts
        )
    if bench.hf_config is not None:
        if "model" in options.of(ENGINE):
            raise ConfigError("give either MODEL or --hf-config, not both")
        defaults |= {"model": str(shape_folder(bench.hf_config)), "load_format": "dummy"}
    return options.engine(**defaults)


def workloads(bench: BenchConfig, info: EngineInfo) -> list[Workload]:
    """Return the requested workloads. Raises ``ConfigError`` if one does not fit the engine."""
    selection = [clip_to_vocab(workload(name, bench), info.vocab_size) for name in bench.workload]
    for item in selection:
        if item.longest > info.max_model_len:
            raise ConfigError(
                f"the workload {item.name} has a sequence of {item.longest} tokens, the engine takes "
                f"{info.max_model_len}; raise --max-model-len or choose another --workload"
            )
    return selection


def params_of(bench_workload: Workload, temperature: float) -> list[SamplingParams]:
    """Return parameters with which each request generates exactly its number of tokens, no text."""
    base = SamplingParams(temperature=temperature, ignore_eos=True, detokenize=False)
    return [base.replace(max_tokens=count, min_tokens=0) for count in bench_workload.outputs]


def run_info(
    info: EngineInfo, options: Mapping[str, Any], bench: BenchConfig, startup: float
) -> RunInfo:
    return RunInfo(
        treadle=treadle.__version__,
        torch=metadata.version("torch"),  # without importing it beside the engine's process
        model=bench.hf_config or info.model,
        architecture=info.architecture,
        device=info.device,
        device_name=device_name(info.device),
        dtype=info.dtype,
        quantization=options.get("quantization"),
        attention=info.attention,
        startup_seconds=round(startup, 3),
    )


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(torch.device(device))
    return platform.processor() or platform.machine()


def ids_of(prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Return prompts in the form that ``LLM`` and ``AsyncLLM`` take."""
    return [{"prompt_token_ids": list(ids)} for ids in prompts]
