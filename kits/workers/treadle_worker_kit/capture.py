"""The capture of CUDA graphs: which sizes of steps, and whether a model lets them be captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from msgspec.structs import replace
from tqdm import tqdm

from treadle.config import SchedulerConfig
from treadle.errors import TreadleError
from treadle.runner.model_runner import LoadedModel, ModelRunner
from treadle_worker_kit.memory import MemoryUsage
from treadle_worker_kit.prompt_graphs import PromptGraphs
from treadle_worker_kit.repeated_layers import repeated_layers
from treadle_worker_kit.sampler_kernels import sampling_in_vain
from treadle_worker_kit.stages import StartStages
from treadle_worker_kit.step_graphs import StepGraphs

__all__ = ("MAX_PROMPT_TOKENS", "bucket_sizes", "capture_graphs")

log = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 512
"""Tokens up to which whole steps are captured, if ``max_num_seqs`` is not more."""
PIECE_TOKENS = (128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Tokens of the steps with prompts that are captured in pieces."""
MIN_LAUNCH_SHARE = 0.5
"""Longer ones are captured, too, where launching takes more than this share of a step's time."""


def capture_graphs(
    runner: ModelRunner,
    loaded: LoadedModel,
    limits: SchedulerConfig,
    stages: StartStages,
    usage: MemoryUsage,
) -> list[str]:
    """Capture CUDA graphs, and return sentences about those that could not be."""
    free_bytes = torch.cuda.mem_get_info(loaded.device)[0]
    report = []
    if all(group.graph_safe for group in loaded.attention):
        _capture_steps(runner, loaded, limits, stages)
    else:
        name = loaded.info.attention
        report.append(f"Steps are not captured as a whole: attention {name} is not graph-safe.")
    has_room = torch.cuda.mem_get_info(loaded.device)[0] > 2 * usage.activations
    if not _capture_pieces(runner, loaded, limits, stages, has_room=has_room):
        report.append(
            "Steps with long prompts are not captured: the model waits for the device, or attends "
            "elsewhere than in its attention layers."
        )
    usage.graphs = free_bytes - torch.cuda.mem_get_info(loaded.device)[0]
    return report


def bucket_sizes(max_size: int) -> list[int]:
    """Return the batch sizes to capture, denser where padding would cost more."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    sizes += range(576, max_size + 64, 64)
    return [*(size for size in sizes if size < max_size), max_size]


def _capture_steps(
    runner: ModelRunner, loaded: LoadedModel, limits: SchedulerConfig, stages: StartStages
) -> None:
    """Capture whole steps: those of as many decodes as may be, and more if the model lets them."""
    graphs = runner.graphs = StepGraphs(runner, loaded.attention)
    most = min(MAX_PROMPT_TOKENS, limits.max_num_batched_tokens)
    with stages.ahead() as compiles, sampling_in_vain(runner.sampler):
        sizes, most_decodes = _step_sizes(limits, most)
        for rows in sizes if compiles else ():
            graphs.warm_up(rows, with_sampling=rows <= most_decodes)
    while most > limits.max_num_seqs and not _never_waits(graphs.warm_up, most, stages):
        most //= 2
    sizes, most_decodes = _step_sizes(limits, most)
    # Linear layers have kernels for one to four rows.
    _warm_up(graphs.warm_up, 3, stages, whole=False)
    for rows in tqdm(sizes, desc="Capturing CUDA graphs", unit="size", leave=False):
        stages.step(f"{rows} rows")
        with_sampling = rows <= most_decodes
        warm_up = partial(graphs.warm_up, with_sampling=with_sampling)
        _warm_up(warm_up, rows, stages, whole=rows == sizes[0])
        graphs.capture(rows, with_sampling=with_sampling)
    runner.info = replace(runner.info, max_graph_tokens=sizes[0])


def _step_sizes(limits: SchedulerConfig, most: int) -> tuple[list[int], int]:
    """Return the sizes of whole steps, the largest first, and the largest of those that only decode."""
    sizes = bucket_sizes(max(limits.max_num_seqs, most))[::-1]
    return sizes, min(size for size in sizes if size >= limits.max_num_seqs)


def _capture_pieces(
    runner: ModelRunner,
    loaded: LoadedModel,
    limits: SchedulerConfig,
    stages: StartStages,
    *,
    has_room: bool = True,
) -> bool:
    """Capture steps with prompts in pieces, and return whether the model lets them be captured.

    ``has_room`` is whether there is memory for the results of a full step.
    """
    graphs = PromptGraphs(loaded, limits.max_num_seqs)
    sizes = [size for size in PIECE_TOKENS if size <= limits.max_num_batched_tokens]
    if not sizes:
        return True
    with stages.ahead() as compiles:
        for tokens in {limits.max_num_batched_tokens, *sizes} if compiles else ():
            graphs.warm_up(tokens)
    most = sizes[-1]
    if not _never_waits(graphs.warm_up, most, stages):
        return False
    long_sizes = _long_sizes(graphs, limits, stages) if stages.all_agree(has_room) else []
    for tokens in [*long_sizes, *sizes[::-1]]:
        stages.step(f"{tokens} tokens")
        if tokens < most:
            _warm_up(graphs.warm_up, tokens, stages, whole=False)
        if not graphs.capture(tokens):
            return False
    runner.forward = graphs.forward
    most = max(most, runner.info.max_graph_tokens)
    runner.info = replace(runner.info, max_graph_tokens=most)
    return True


def _long_sizes(graphs: PromptGraphs, limits: SchedulerConfig, stages: StartStages) -> list[int]:
    """Return sizes of full steps, and halves of them, that a small model computes sooner than they are launched."""
    sizes: list[int] = []
    size = limits.max_num_batched_tokens
    while size > PIECE_TOKENS[-1]:
        stages.step(f"{size} tokens")
        _warm_up(graphs.warm_up, size, stages, whole=False)
        is_launched_long = sizes or stages.all_agree(graphs.warm_up(size) > MIN_LAUNCH_SHARE)
        if is_launched_long and _never_waits(graphs.warm_up, size, stages):
            sizes.append(size)
        size //= 2
    return sizes


def _warm_up(
    warm_up: Callable[[int], object], size: int, stages: StartStages, *, whole: bool = True
) -> None:
    """Run a step of a size, or unless ``whole``, one of each kind of its layers: launching all takes time."""
    with repeated_layers(None if whole else stages.model):
        # First each rank alone, so that no kernel waits on a device for a rank that is still compiling.
        with stages.dry_run() as compiles:
            if compiles:
                warm_up(size)
        warm_up(size)
    stages.meet()


def _never_waits(warm_up: Callable[[int], object], size: int, stages: StartStages) -> bool:
    """Return whether the model runs a step without waiting for the device, which no graph holds.

    A capture that fails would leave the device in an error.
    """
    stages.step(f"{size} tokens")
    _warm_up(warm_up, size, stages)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        warm_up(size)
        result = True
    except (RuntimeError, TreadleError) as error:
        log.debug("a step of %d tokens cannot be captured", size, exc_info=error)
        result = False
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return stages.all_agree(result)
