"""One measured workload as one JSON line."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

import msgspec

from treadle_cli.bench.percentiles import LatencyStats

__all__ = ("About", "Latency", "Result", "Startup", "select_pass")


class About(msgspec.Struct, frozen=True, kw_only=True):
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
    """Rates are per second of wall-clock time of the picked pass."""

    kind: Literal["throughput", "latency"]
    workload: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    wall_seconds: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    pick: str
    passes: list[float]
    """Wall seconds of every timed pass."""
    about: About
    latency: Latency | None = None


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the process was started, and of each stage before it was ready."""

    kind: str = "startup"
    first_token_seconds: float
    ready_seconds: float
    stages: dict[str, float]
    pick: str
    passes: list[float]
    """Seconds to the first token of every timed start."""
    about: About


def select_pass(walls: Sequence[float], pick: str) -> int:
    """The index of the pass to report: the fastest, or that nearest to the median."""
    wanted = min(walls) if pick == "best" else median(walls)
    return min(range(len(walls)), key=lambda i: abs(walls[i] - wanted))
