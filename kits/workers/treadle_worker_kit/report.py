"""The startup report: memory and time, as lines of ``EngineInfo.report``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from treadle.api.step_types import EngineInfo
from treadle.config import EngineConfig
from treadle_worker_kit.memory import GIB, MemoryUsage, max_pages_per_sequence, savings

__all__ = ("memory_lines", "option_line", "process_seconds", "stage_line")


def memory_lines(info: EngineInfo, usage: MemoryUsage, step_tokens: int) -> Iterator[str]:
    """Yield lines for weights, activations and KV cache. CUDA graphs have a separate line."""
    yield f"weights      {usage.weights / GIB:8.3f} GiB"
    if usage.activations:
        yield f"activations  {usage.activations / GIB:8.3f} GiB in a step of {step_tokens} tokens"
    size, length = info.page_size, info.max_model_len
    parts = ", ".join(
        f"{g.num_pages} pages x {size} = {g.num_pages * size} tokens ({g.kind})"
        for g in info.kv_cache_groups
    )
    max_sequences = min(
        (g.num_pages - 1) / max_pages_per_sequence(length, g.window, size)
        for g in info.kv_cache_groups
    )
    yield (
        f"KV cache     {usage.cache / GIB:8.3f} GiB: {parts}, "
        f"enough for {max_sequences:.1f} sequences of {length} tokens"
    )
    if usage.shared:
        yield f"shared       {usage.shared / GIB:8.3f} GiB of symmetric buffers between ranks"


def option_line(config: EngineConfig, usage: MemoryUsage) -> str:
    """Return a line with options that free memory, and how much."""
    parts = [f"{size / GIB:.3f} GiB {option}" for option, size in savings(config, usage)]
    if usage.total:
        parts.append(f"gpu_memory_utilization: 0.01 is {usage.total / 100 / GIB:.3f} GiB")
    else:
        parts.append("kv_cache_memory_bytes is the size of the cache")
    return "would free   " + ", ".join(parts)


def stage_line(stages: Mapping[str, float]) -> str:
    """Return a line with the seconds of each stage and the age of the process."""
    stage_times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.items())
    total = sum(stages.values())
    age = process_seconds()
    age_text = "" if age is None else f", ready {age:.1f} s after the process began"
    return f"start        {total:8.1f} s: {stage_times}{age_text}"


def process_seconds() -> float | None:
    """Return the age of this process, or ``None`` if unknown (on systems other than Linux)."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks = int(fields[19])  # starttime, field 22 of the file; the first two are cut off
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
