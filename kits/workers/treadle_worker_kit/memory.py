"""Memory of a loaded model, the number of KV cache pages that fit, and options that free memory."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig
from treadle.errors import OutOfMemoryError, PluginLoadError
from treadle_layers_kit import Quantizable

__all__ = (
    "GIB",
    "MemoryUsage",
    "cache_advice",
    "count_pages",
    "explain_out_of_memory",
    "is_out_of_memory",
    "machine_bytes",
    "max_pages_per_sequence",
    "plain_bytes",
    "saving_sentence",
    "savings",
    "size_text",
    "weight_bytes",
)

GIB = 1 << 30
CPU_CACHE_BYTES = GIB
MAX_UTILIZATION = 0.98
"""Highest ``gpu_memory_utilization`` that an error advises: the driver needs some memory too."""


@dataclass(slots=True)
class MemoryUsage:
    """Memory of a rank's device, in bytes. ``total`` is 0 unless it is a CUDA device."""

    total: int = 0
    weights: int = 0
    quantizable: int = 0
    """The part of the weights in 16 bits that ``quantization`` could store in 8."""
    activations: int = 0
    cache: int = 0
    shared: int = 0
    """Symmetric buffers, for communication between ranks."""
    graphs: int = 0

    def available_for_kv_cache(self, config: EngineConfig, device: torch.device) -> int:
        """Return the bytes available for the KV cache. Call it after loading the weights."""
        if config.cache.kv_cache_memory_bytes is not None:
            return config.cache.kv_cache_memory_bytes
        if device.type != "cuda":
            return CPU_CACHE_BYTES
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return int(config.cache.gpu_memory_utilization * total - (total - free) - self.activations)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights, including those that a linear method has repacked."""
    packed = (m.__dict__.get("prepacked") for m in model.modules())
    weights = (*model.parameters(), *(w for w in packed if w is not None))
    return sum(w.numel() * w.element_size() for w in weights)


def plain_bytes(model: nn.Module) -> int:
    """Return the bytes of 16-bit weights that could be quantized."""
    weights = (w for m in model.modules() if isinstance(m, Quantizable) for w in m.quantizable())
    return sum(w.numel() * 2 for w in weights if w.element_size() == 2)


def size_text(num_bytes: float) -> str:
    """Return a size in the largest unit that shows it: ``15.3 GiB``, ``16.0 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size / 10:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} KiB"


def max_pages_per_sequence(max_model_len: int, window: int | None, page_size: int) -> int:
    """Return the maximum number of pages of a sequence in a group with ``window``."""
    num_pages = -(-max_model_len // page_size)
    return num_pages if window is None else min(num_pages, -(-window // page_size) + 2)


def count_pages(
    config: EngineConfig,
    page_bytes: Sequence[int],
    windows: Sequence[int | None],
    page_size: int,
    max_model_len: int,
    available: int,
    usage: MemoryUsage,
) -> list[int]:
    """Return the pages of each KV cache group, including the null page.

    No group gets more pages than ``max_num_seqs`` sequences of maximum length can use: in a group
    with a sliding window, the window of each sequence and the tokens of a step. Raises
    ``OutOfMemoryError``, with the figures of ``usage``, if ``available`` bytes are too few.
    """
    if config.cache.num_pages is not None:
        return [config.cache.num_pages] * len(page_bytes)
    seqs = config.scheduler.max_num_seqs
    max_pages = _max_pages(config, windows, page_size, max_model_len, seqs)
    required_bytes = sum(n * size for n, size in zip(max_pages, page_bytes, strict=True))
    if required_bytes <= available:
        return max_pages
    share = max(0.0, available / required_bytes)
    pages = [int(n * share) for n in max_pages]
    if min(pages) < 2:
        raise OutOfMemoryError(_too_little(config, available, 2 * sum(page_bytes), usage))
    return pages


def _max_pages(
    config: EngineConfig,
    windows: Sequence[int | None],
    page_size: int,
    max_model_len: int,
    seqs: int,
) -> list[int]:
    """Return the pages of each group that ``seqs`` sequences of maximum length can use."""
    step = config.scheduler.chunked_prefill_size or config.scheduler.max_num_batched_tokens
    return [
        1
        + max_pages_per_sequence(max_model_len, window, page_size) * seqs
        + (0 if window is None else -(-step // page_size))
        for window in windows
    ]


def cache_advice(
    config: EngineConfig,
    page_bytes: Sequence[int],
    windows: Sequence[int | None],
    page_size: int,
    max_model_len: int,
    usage: MemoryUsage,
) -> str:
    """Return what makes a KV cache with too few pages hold one sequence of ``max_model_len``."""
    needed = _max_pages(config, windows, page_size, max_model_len, 1)
    if config.cache.num_pages is not None:
        return f"raise num_pages to {max(needed)}"
    # All groups get the same share of the pages that they could use, rounded down.
    seqs = config.scheduler.max_num_seqs
    most = _max_pages(config, windows, page_size, max_model_len, seqs)
    share = max(n / limit for n, limit in zip(needed, most, strict=True))
    needed_bytes = math.ceil(
        sum(size * (share * n + 1) for n, size in zip(most, page_bytes, strict=True))
    )
    return _more_cache(config, needed_bytes, needed_bytes - usage.cache, usage)


def _more_cache(
    config: EngineConfig, needed_bytes: int, missing_bytes: int, usage: MemoryUsage
) -> str:
    """Return the option that gives the KV cache ``needed_bytes``, ``missing_bytes`` more than now."""
    if not usage.total or config.cache.kv_cache_memory_bytes is not None:
        return f"raise kv_cache_memory_bytes to {needed_bytes} ({size_text(needed_bytes)})"
    fraction = config.cache.gpu_memory_utilization + missing_bytes / usage.total
    fraction = math.ceil(fraction * 100) / 100
    if fraction <= MAX_UTILIZATION:
        return f"raise gpu_memory_utilization to {fraction:g}"
    return f"free {size_text(missing_bytes)} on the device, or raise tensor_parallel_size"


def _too_little(
    config: EngineConfig, available: int, required_bytes: int, usage: MemoryUsage
) -> str:
    text = (
        f"{size_text(max(0, available))} are left for the KV cache, but the smallest one needs "
        f"{size_text(required_bytes)}"
    )
    advice = _more_cache(config, required_bytes, required_bytes - available, usage)
    if not usage.total or config.cache.kv_cache_memory_bytes is not None:
        return f"{text}; {advice}, or lower page_size"
    fraction = config.cache.gpu_memory_utilization
    allowed = fraction * usage.total
    other_bytes = allowed - available - usage.weights - usage.activations
    return (
        f"{text}: gpu_memory_utilization {fraction} of {size_text(usage.total)} allows "
        f"{size_text(allowed)}, of which the weights take {size_text(usage.weights)}, the activations "
        f"of a step {size_text(usage.activations)} and everything else on the device "
        f"{size_text(max(0.0, other_bytes))}; {advice}. "
        + " ".join(saving_sentence(*saving) for saving in savings(config, usage))
    ).strip(" .")


def savings(
    config: EngineConfig, usage: MemoryUsage, info: EngineInfo | None = None
) -> list[tuple[str, int]]:
    """Return options that would free memory, with estimated bytes, the largest first.

    ``info`` is ``None`` if there is no KV cache yet.
    """
    tokens, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    is_fp8 = config.cache.kv_cache_dtype.startswith("fp8")
    options = [
        ("quantization=fp8", usage.quantizable // 2 if usage.total else 0),
        ("kv_cache_dtype=fp8_e4m3", 0 if is_fp8 else usage.cache // 2),
        (f"halving max_num_batched_tokens to {tokens // 2}", usage.activations // 2),
        (
            f"halving max_num_seqs to {seqs // 2}",
            usage.graphs // 2 + _unused_cache_bytes(config, usage, info) if seqs > 1 else 0,
        ),
        ("enforce_eager", usage.graphs),
    ]
    return sorted((item for item in options if item[1] > 0), key=lambda item: -item[1])


def _unused_cache_bytes(config: EngineConfig, usage: MemoryUsage, info: EngineInfo | None) -> int:
    """Return the bytes of the KV cache that half of ``max_num_seqs`` sequences cannot fill."""
    if info is None or config.cache.num_pages is not None:
        return 0
    groups = info.kv_cache_groups
    windows, seqs = [group.window for group in groups], config.scheduler.max_num_seqs // 2
    pages = _max_pages(config, windows, info.page_size, info.max_model_len, seqs)
    return max(0, usage.cache - sum(n * g.page_bytes for n, g in zip(pages, groups, strict=True)))


def saving_sentence(option: str, num_bytes: int) -> str:
    """Return what an option of ``savings`` frees, as a sentence."""
    tokens = " for as many tokens" if option.startswith("kv_cache_dtype") else ""
    subject = option.capitalize() if option.startswith("halving") else option
    return f"{subject} frees {size_text(num_bytes)}{tokens}."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch ran out of memory, in a plugin or elsewhere."""
    root = error.__cause__ if isinstance(error, PluginLoadError) else error
    if isinstance(root, OSError):  # of a mapping, such as the cache of a CPU
        return root.errno == errno.ENOMEM
    # On a CPU, torch has no special exception type for it.
    return isinstance(root, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(root)


def machine_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def explain_out_of_memory(device: torch.device, activity: str, advice: str) -> Iterator[None]:
    """Convert torch's out-of-memory errors to ``OutOfMemoryError`` with figures and ``advice``."""
    try:
        yield
    except (RuntimeError, OSError, PluginLoadError) as error:
        if not is_out_of_memory(error):
            raise
        state = ""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            used_bytes = torch.cuda.memory_allocated(device)
            state = f": treadle uses {size_text(used_bytes)} of {size_text(total)}, {size_text(free)} are free"
        raise OutOfMemoryError(
            f"the device ran out of memory while {activity}{state}; {advice}"
        ) from error
