"""Loading the model and allocating its KV cache, from an engine's options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from treadle.api.attention import CommonAttentionMetadata
from treadle.api.communicators import Communicator
from treadle.api.devices import device_info, dtype_name
from treadle.api.kinds import MODELS
from treadle.api.step_types import EngineInfo, KVCacheGroup
from treadle.config import EngineConfig
from treadle.errors import ConfigError, OutOfMemoryError
from treadle.loading import fetch, parse_ref
from treadle.plugins import PluginManager
from treadle.runner.attention import build_metadata
from treadle.runner.model_runner import LoadedModel
from treadle_worker_kit.attention import AttentionLayers
from treadle_worker_kit.budget import MemoryBudget
from treadle_worker_kit.build import build_model
from treadle_worker_kit.device import pick_device
from treadle_worker_kit.fusion import apply_fusions, kernel_finder, try_kernels
from treadle_worker_kit.memory import (
    MemoryUsage,
    cache_advice,
    count_pages,
    explain_out_of_memory,
    machine_bytes,
    plain_bytes,
    size_text,
    weight_bytes,
)
from treadle_worker_kit.model_config import (
    eos_ids,
    max_model_len,
    read_config,
    resolve_dtype,
    text_config,
)
from treadle_worker_kit.scales import calculate_scales
from treadle_worker_kit.stages import DOWNLOAD, StartStages

__all__ = ("load_model",)

PROMPT_TOKENS = 512
"""Of a step with which attention backends try their kernels for prompts."""


def load_model(
    config: EngineConfig,
    plugins: PluginManager,
    tp_group: Communicator,
    stages: StartStages,
    prepare: Callable[[torch.nn.Module, torch.device, str], None] | None = None,
) -> tuple[LoadedModel, MemoryUsage]:
    """Build and load the model, then size and allocate its KV cache.

    ``prepare`` is called with the empty model, its device and the name of its dtype.
    """
    options = config.model
    with stages.stage(DOWNLOAD):
        ref = parse_ref(options.model, options.revision, options.download_dir)
        files = fetch(plugins, ref, options.load_format)
    with stages.stage("configuration"):
        device = pick_device(config.device.device, tp_group.rank)
        if device.type == "cuda":
            stages.compiler.open()
            torch.cuda.set_device(device)
        elif config.device.cpu_threads is not None:
            torch.set_num_threads(config.device.cpu_threads)
        _, hf_config = read_config(files, plugins, options.hf_overrides)
        info = device_info(device)
        dtype = resolve_dtype(options.dtype, hf_config, info)
        max_len = max_model_len(hf_config, options.max_model_len)
        vocab_size: int = text_config(hf_config).vocab_size
        attention = AttentionLayers(config, plugins, info)
        usage = MemoryUsage(total=info.memory or 0)
        base_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def before_weights(model: torch.nn.Module) -> None:
        """Whatever needs only the shapes of the empty model."""
        with stages.ahead(always=True) as compiles:
            if compiles:
                prompt = _null_batch(1, min(PROMPT_TOKENS, max_len), attention, device)
                build_metadata(attention.attention_groups, [prompt] * len(attention.cache_groups))
                try_kernels(model, kernel_finder(plugins), info, dtype_name(dtype))
        stages.model = model
        if prepare is not None:
            prepare(model, device, dtype_name(dtype))

    advice = "use a larger tensor_parallel_size, a quantized checkpoint, or quantization=fp8"
    with (
        stages.stage("weights"),
        explain_out_of_memory(device, "loading the weights", advice),
    ):
        model, spec = build_model(
            files,
            hf_config,
            plugins,
            device,
            dtype,
            tp_group,
            attention.register,
            load_format=options.load_format,
            quantization=options.quantization,
            max_model_len=max_len,
            seed=options.seed,
            progress=stages.alive,
            building=MemoryBudget(files, device),
            prepare=before_weights,
        )
    with stages.stage("cache"):
        guarded: Any = plugins.guarded(MODELS, spec.architecture, model, "CausalModel")
        stages.check_alike(
            "attention backends",
            attention.names,
            attention.page_size,
            max_len,
            all(group.graph_safe for group in attention.attention_groups),
        )
        usage.weights, usage.quantizable = weight_bytes(model), plain_bytes(model)
        if device.type == "cuda":
            usage.weights = torch.cuda.memory_allocated(device) - base_bytes
        pages = _size_cache(config, guarded, attention, device, max_len, usage, stages)
        pages = tp_group.all_reduce_min(pages)
        usage.cache = sum(n * size for n, size in zip(pages, attention.page_bytes(), strict=True))
        max_len, cut = _fit_length(config, attention, pages, max_len, usage)
        if device.type == "cpu" and usage.cache > machine_bytes():
            # The system grants it nevertheless, and ends the process when the memory is used.
            raise OutOfMemoryError(
                f"{size_text(usage.cache)} of KV cache are more than the {size_text(machine_bytes())} "
                f"of this machine; lower {_cache_option(config, device)}"
            )
        with explain_out_of_memory(
            device,
            f"allocating {size_text(usage.cache)} of KV cache",
            f"lower {_cache_option(config, device)}",
        ):
            attention.allocate(pages, device, model)
        if config.cache.calculate_kv_scales:
            stages.step("scales")
            calculate_scales(
                guarded, attention, tp_group, stages, pages, device, vocab_size, max_len
            )
    with stages.stage("kernels"):
        fusions = apply_fusions(model, kernel_finder(plugins), info, dtype_name(dtype))
        usage.shared = tp_group.memory_bytes
        groups = _cache_groups(attention, pages)
    facts = EngineInfo(
        model=config.model.model,
        architecture=spec.architecture,
        dtype=dtype_name(dtype),
        device=str(device),
        vocab_size=vocab_size,
        max_model_len=max_len,
        page_size=attention.page_size or 0,
        kv_cache_groups=groups,
        num_async_steps=1 if device.type == "cuda" else 0,
        eos_token_ids=sorted(eos_ids(hf_config, files)),
        attention=attention.names,
        weights_bytes=usage.weights,
        report=cut,
        stages=stages.seconds,
    )
    facts.report.extend(fusions.lines())
    return LoadedModel(guarded, device, attention.attention_groups, facts), usage


def _cache_groups(attention: AttentionLayers, pages: list[int]) -> list[KVCacheGroup]:
    counts = [0] * len(pages)
    for _, group in attention.specs.values():
        counts[group.cache_group] += 1
    return [
        KVCacheGroup(kind=kind, window=window, num_pages=n, layers=layers, page_bytes=size)
        for (kind, window), n, layers, size in zip(
            attention.cache_groups, pages, counts, attention.page_bytes(), strict=True
        )
    ]


def _size_cache(
    config: EngineConfig,
    model: Any,
    attention: AttentionLayers,
    device: torch.device,
    max_len: int,
    usage: MemoryUsage,
    stages: StartStages,
) -> list[int]:
    """Return the pages of each group. Sets ``usage.activations``, the memory of a full step."""
    if device.type == "cuda":
        tokens = config.scheduler.max_num_batched_tokens
        with explain_out_of_memory(
            device, f"measuring a step of {tokens} tokens", "lower max_num_batched_tokens"
        ):
            usage.activations = _measure_activations(config, model, attention, device, stages)
    return count_pages(
        config,
        attention.page_bytes(),
        [window for _, window in attention.cache_groups],
        attention.page_size or 0,
        max_len,
        usage.available_for_kv_cache(config, device),
        usage,
    )


@torch.inference_mode()
def _measure_activations(
    config: EngineConfig,
    model: Any,
    attention: AttentionLayers,
    device: torch.device,
    stages: StartStages,
) -> int:
    """Measure the peak bytes of a step with the maximum number of tokens, on null pages."""
    attention.allocate([2] * len(attention.cache_groups), device, model)
    with stages.ahead(always=True) as compiles:
        if compiles:
            _largest_step(config, model, attention, device)
    with stages.dry_run() as compiles:
        if compiles:
            _largest_step(config, model, attention, device)
            torch.cuda.synchronize(device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    base_bytes = torch.cuda.memory_allocated(device)
    _largest_step(config, model, attention, device)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - base_bytes


def _largest_step(
    config: EngineConfig, model: Any, attention: AttentionLayers, device: torch.device
) -> None:
    """Run a step with the maximum number of tokens, and what a sampler needs for its rows."""
    tokens = config.scheduler.max_num_batched_tokens
    rows = min(tokens, config.scheduler.max_num_seqs)
    batch = _null_batch(tokens, 1, attention, device)
    zeros = batch.slot_mapping
    forward_ctx = build_metadata(attention.attention_groups, [batch] * len(attention.cache_groups))
    hidden = model.forward(zeros, zeros, forward_ctx)
    logits = model.compute_logits(hidden[:rows])
    # The sampler needs a few float32 copies of the logits.
    logits = logits.float()
    _ = [logits.clone() for _ in range(3)]


def _null_batch(
    rows: int, query_len: int, attention: AttentionLayers, device: torch.device
) -> CommonAttentionMetadata:
    """Return a step in which ``rows`` sequences begin with ``query_len`` tokens each, on null pages."""
    pages = -(-query_len // (attention.page_size or query_len))
    return CommonAttentionMetadata(
        page_size=attention.page_size or 0,
        num_decodes=rows if query_len == 1 else 0,
        max_query_len=query_len,
        max_seq_len=query_len,
        query_start_loc=torch.arange(
            0, rows * query_len + 1, query_len, dtype=torch.int32, device=device
        ),
        seq_lens=torch.full((rows,), query_len, dtype=torch.int32, device=device),
        page_table=torch.zeros(rows, pages, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(rows * query_len, dtype=torch.int64, device=device),
        query_lens_cpu=[query_len] * rows,
        seq_lens_cpu=[query_len] * rows,
    )


def _cache_option(config: EngineConfig, device: torch.device) -> str:
    """Return the name of the option that decides how large the KV cache is."""
    if config.cache.num_pages is not None:
        return "num_pages"
    is_fraction = device.type == "cuda" and config.cache.kv_cache_memory_bytes is None
    return "gpu_memory_utilization" if is_fraction else "kv_cache_memory_bytes"


def _fit_length(
    config: EngineConfig,
    attention: AttentionLayers,
    pages: list[int],
    max_len: int,
    usage: MemoryUsage,
) -> tuple[int, list[str]]:
    """Return ``max_len``, or the length that fits and a sentence about it.

    Raises ``ConfigError`` if the user set more than fits.
    """
    size = attention.page_size or 0
    full = [
        n - 1
        for n, (_, window) in zip(pages, attention.cache_groups, strict=True)
        if window is None or n - 1 < -(-window // size) + 2
    ]
    if not full or min(full) * size >= max_len:
        return max_len, []
    limit = min(full) * size
    windows = [window for _, window in attention.cache_groups]
    advice = cache_advice(config, attention.page_bytes(), windows, size, max_len, usage)
    if config.model.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {max_len} tokens, but the KV cache holds {limit} "
            f"({min(full)} pages of {size}); lower max_model_len, or {advice}"
        )
    return limit, [
        f"The context is {limit:,} tokens, not the model's {max_len:,}: the KV cache holds no more. For "
        f"all of it, {advice}."
    ]
