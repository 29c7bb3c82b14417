"""What ``LLM.get_metrics`` returns: the engine's numbers under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from treadle.api.stats import EngineStats

__all__ = ("Counter", "Gauge", "Histogram", "Metric", "Vector", "read")


@dataclass(kw_only=True)
class Metric:
    """A name, and what tells it from others of the same name."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Counter(Metric):
    """A number that grows only."""

    value: int


@dataclass(kw_only=True)
class Gauge(Metric):
    """A number of this moment."""

    value: float


@dataclass(kw_only=True)
class Vector(Metric):
    """A list of numbers; vLLM has one for speculative decoding, treadle none."""

    values: list[int]


@dataclass(kw_only=True)
class Histogram(Metric):
    """How many observations are at most so large; the last bucket has all of them."""

    count: int
    sum: float
    buckets: dict[str, int]


REASONS = ("stop", "length", "abort", "error")


def read(stats: EngineStats) -> Iterator[Metric]:
    """Yield what vLLM's engine counts in its steps, as treadle's does. Times of requests are the server's."""
    yield Gauge(name="vllm:num_requests_running", value=stats.num_running)
    yield Gauge(name="vllm:num_requests_waiting", value=stats.num_waiting)
    usage = stats.num_used_pages / stats.num_pages if stats.num_pages else 0.0
    yield Gauge(name="vllm:kv_cache_usage_perc", value=usage)
    yield Counter(name="vllm:prefix_cache_queries", value=stats.prefix_cache_queries)
    yield Counter(name="vllm:prefix_cache_hits", value=stats.prefix_cache_hits)
    yield Counter(name="vllm:num_preemptions", value=stats.num_preemptions)
    yield Counter(name="vllm:prompt_tokens", value=stats.prompt_tokens)
    yield Counter(name="vllm:generation_tokens", value=stats.generation_tokens)
    for reason in REASONS:
        yield Counter(
            name="vllm:request_success",
            labels={"finished_reason": reason},
            value=stats.finished.get(reason, 0),
        )
    total, buckets = 0, {}
    for exponent, count in sorted(stats.steps_by_tokens.items()):
        total += count
        buckets[str(float(2**exponent))] = total
    yield Histogram(
        name="vllm:iteration_tokens_total",
        count=total,
        sum=float(stats.step_tokens),
        buckets={**buckets, "+Inf": total},
    )
