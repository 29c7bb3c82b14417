"""The startup report: memory and time, as sentences of ``EngineInfo.report``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig
from treadle_worker_kit.memory import (
    MemoryUsage,
    max_pages_per_sequence,
    saving_sentence,
    savings,
    size_text,
)

__all__ = ("memory_lines", "process_seconds", "stage_line")


def memory_lines(config: EngineConfig, info: EngineInfo, usage: MemoryUsage) -> Iterator[str]:
    """Yield what takes the memory, what the KV cache holds, and what options would free."""
    tokens = config.scheduler.max_num_batched_tokens
    parts = [
        f"{name} {size_text(size)}"
        for name, size in (
            (f"the activations of a step of {tokens:,} tokens", usage.activations),
            ("the CUDA graphs", usage.graphs),
            ("the buffers that ranks share", usage.shared),
        )
        if size
    ]
    yield ", ".join([f"The weights take {size_text(usage.weights)}", *parts]) + "."
    yield _cache_sentence(info, usage)
    for option, size in savings(config, usage, info):
        yield saving_sentence(option, size)
    if usage.total and config.cache.kv_cache_memory_bytes is None:
        yield f"Lowering gpu_memory_utilization by 0.01 leaves {size_text(usage.total / 100)} to others."


def _cache_sentence(info: EngineInfo, usage: MemoryUsage) -> str:
    """Say how many tokens the KV cache holds, without the null page, and how many requests that is."""
    size, length, groups = info.page_size, info.max_model_len, info.kv_cache_groups
    counts = [(g.kind, (g.num_pages - 1) * size) for g in groups]
    if len(counts) == 1:
        tokens = f"{counts[0][1]:,} tokens"
    else:
        tokens = " and ".join(f"{count:,} tokens ({kind})" for kind, count in counts)
    requests = min(
        (g.num_pages - 1) // max_pages_per_sequence(length, g.window, size) for g in groups
    )
    return (
        f"The KV cache of {size_text(usage.cache)} holds {tokens}: {requests:,} "
        f"request{'s' * (requests != 1)} of the full context of {length:,}."
    )


def stage_line(stages: Mapping[str, float]) -> str:
    """Return a sentence with the seconds of each stage and the age of the process."""
    stage_times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items())
    age = process_seconds()
    age_text = "" if age is None else f"; ready {age:.1f} s after the process began"
    return f"The start took {sum(stages.values()):.1f} s: {stage_times}{age_text}."


def process_seconds() -> float | None:
    """Return the age of this process, or ``None`` if unknown (on systems other than Linux)."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks = int(fields[19])  # starttime, field 22 of the file; the first two are cut off
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
