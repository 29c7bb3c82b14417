"""How many pages the KV cache gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.config import EngineConfig
from weft.errors import OutOfMemoryError

__all__ = ("count_pages", "free_bytes")

GIB = 1 << 30


def free_bytes(config: EngineConfig, device: torch.device, activation_bytes: int) -> int:
    """Bytes that the cache may fill, now that the weights are loaded."""
    if device.type != "cuda":
        return int(config.cache.cpu_cache_gib * GIB)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed = config.cache.memory_fraction * total
    return int(allowed - (total - free) - activation_bytes)


def count_pages(
    config: EngineConfig,
    page_bytes: Sequence[int],
    windows: Sequence[int | None],
    page_size: int,
    max_model_len: int,
    available: int,
) -> list[int]:
    """Pages of each cache group, the null page included.

    No group gets more than all slots could fill with the longest sequences. A group with a window
    needs, for each slot, the window and what one step writes.
    """
    if config.cache.num_pages is not None:
        return [config.cache.num_pages] * len(page_bytes)
    seqs = config.scheduler.max_num_seqs
    step = config.scheduler.prefill_chunk or config.scheduler.max_num_batched_tokens
    longest = -(-max_model_len // page_size)
    most = []
    for window in windows:
        held = longest
        if window is not None:
            held = min(longest, -(-window // page_size) + 2)
        most.append(1 + held * seqs + (0 if window is None else -(-step // page_size)))
    wanted = sum(n * size for n, size in zip(most, page_bytes, strict=True))
    if wanted <= available:
        return most
    share = max(0.0, available / wanted)
    pages = [int(n * share) for n in most]
    if min(pages) < 2:
        needed = sum(2 * size for size in page_bytes)
        raise OutOfMemoryError(
            f"{max(0, available) / GIB:.2f} GiB are left for the KV cache, the smallest needs "
            f"{needed / GIB:.2f} GiB; raise memory_fraction (or cpu_cache_gib on a CPU), or lower "
            "max_num_batched_tokens, max_num_seqs or page_size"
        )
    return pages
