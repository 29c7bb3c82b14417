"""The results of benchmarks, printed as JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

from treadle_cli.bench.percentiles import LatencyStats

__all__ = ("Latency", "Result", "RunInfo", "Startup", "select_iteration")


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: the same in every line of a run."""

    treadle: str
    torch: str
    model: str
    architecture: str
    device: str
    device_name: str
    dtype: str
    quantization: str | None
    attention: str
    startup_seconds: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds: to the first token, between tokens, to the end."""

    ttft_ms: LatencyStats
    itl_ms: LatencyStats
    e2e_ms: LatencyStats
    concurrency: int | None = None
    request_rate: float | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured workload. Rates are per second of wall-clock time of the picked iteration."""

    kind: Literal["throughput", "latency"]
    workload: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    wall_seconds: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    pick: str
    iter_seconds: list[float]
    """Wall-clock seconds of every timed iteration."""
    run_info: RunInfo
    latency: Latency | None = None


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the start of the process, and of each stage until it was ready."""

    kind: str = "startup"
    first_token_seconds: float
    ready_seconds: float
    stages: dict[str, float]
    pick: str
    iter_seconds: list[float]
    """Seconds to the first token of every timed start."""
    run_info: RunInfo


def select_iteration(wall_times: Sequence[float], pick: str) -> int:
    """Return the index of the iteration to report: the fastest, or the nearest to the median."""
    target = min(wall_times) if pick == "best" else median(wall_times)
    return min(range(len(wall_times)), key=lambda i: abs(wall_times[i] - target))
