"""Memory of a loaded model, the number of KV cache pages that fit, and options that free memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from treadle.config import EngineConfig
from treadle.errors import OutOfMemoryError, PluginLoadError
from treadle.layers import Quantizable

__all__ = (
    "GIB",
    "MemoryUsage",
    "count_pages",
    "explain_out_of_memory",
    "is_out_of_memory",
    "machine_bytes",
    "max_pages_per_sequence",
    "plain_bytes",
    "savings",
    "weight_bytes",
)

GIB = 1 << 30
CPU_CACHE_BYTES = GIB


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
    step = config.scheduler.chunked_prefill_size or config.scheduler.max_num_batched_tokens
    max_pages = []
    for window in windows:
        pages_per_sequence = max_pages_per_sequence(max_model_len, window, page_size)
        max_pages.append(
            1 + pages_per_sequence * seqs + (0 if window is None else -(-step // page_size))
        )
    required_bytes = sum(n * size for n, size in zip(max_pages, page_bytes, strict=True))
    if required_bytes <= available:
        return max_pages
    share = max(0.0, available / required_bytes)
    pages = [int(n * share) for n in max_pages]
    if min(pages) < 2:
        raise OutOfMemoryError(_too_little(config, available, 2 * sum(page_bytes), usage))
    return pages


def _too_little(
    config: EngineConfig, available: int, required_bytes: int, usage: MemoryUsage
) -> str:
    text = (
        f"{max(0, available) / GIB:.2f} GiB are left for the KV cache, but the smallest one needs "
        f"{required_bytes / GIB:.2f} GiB"
    )
    if not usage.total or config.cache.kv_cache_memory_bytes is not None:
        return f"{text}; raise kv_cache_memory_bytes or lower page_size"
    fraction = config.cache.gpu_memory_utilization
    allowed = fraction * usage.total
    other_bytes = allowed - available - usage.weights - usage.activations
    return (
        f"{text}: gpu_memory_utilization {fraction} of {usage.total / GIB:.1f} GiB allows "
        f"{allowed / GIB:.2f}, of which the weights take {usage.weights / GIB:.2f}, the activations "
        f"of a step {usage.activations / GIB:.2f} and everything else on the device "
        f"{max(0.0, other_bytes) / GIB:.2f}; raise gpu_memory_utilization "
        f"(0.01 is {usage.total / 100 / GIB:.2f} GiB), use a larger tensor_parallel_size, or free memory with "
        + ", ".join(f"{option} ({size / GIB:.2f} GiB)" for option, size in savings(config, usage))
    )


def savings(config: EngineConfig, usage: MemoryUsage) -> list[tuple[str, int]]:
    """Return options that would free memory, with estimated bytes, the largest first."""
    tokens, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    is_fp8 = config.cache.kv_cache_dtype.startswith("fp8")
    options = [
        ("quantization=fp8", usage.quantizable // 2 if usage.total else 0),
        ("kv_cache_dtype=fp8_e4m3 for as many tokens", 0 if is_fp8 else usage.cache // 2),
        (f"max_num_batched_tokens={max(1, tokens // 2)}", usage.activations // 2),
        (f"max_num_seqs={max(1, seqs // 2)}", usage.graphs // 2),
        ("enforce_eager", usage.graphs),
    ]
    return sorted((item for item in options if item[1] > 0), key=lambda item: -item[1])


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
            state = (
                f": treadle uses {used_bytes / GIB:.2f} GiB of {total / GIB:.1f} GiB, "
                f"{free / GIB:.2f} GiB are free"
            )
        raise OutOfMemoryError(
            f"the device ran out of memory while {activity}{state}; {advice}"
        ) from error
