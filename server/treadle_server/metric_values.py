"""What is measured, once: the table of values that ``/metrics`` serves under one or more names.

Every label comes from a closed set: no client can add a series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from treadle.api.stats import EngineStats
from treadle_server.histogram import Histogram

if TYPE_CHECKING:
    from treadle_server.metrics import Metrics

__all__ = ("MEASURED", "OPERATIONS", "REQUEST_HISTOGRAMS", "RESERVED", "Measured", "Sample")

OPERATIONS = ("chat", "text_completion")
"""What a request asks for, in OpenTelemetry's words."""
RESERVED = ("treadle_", "process_", "python_")
"""Prefixes of names that belong to treadle and to the client library."""

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
LENGTHS = tuple(float(2**i) for i in range(0, 21, 1))
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
STEP_EXPONENTS = range(21)

Sample = tuple[tuple[str, ...], "float | Histogram"]
"""The values of the labels, and what was measured."""
Read = Callable[["Metrics", EngineStats], Iterable[Sample]]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A value that is measured. ``buckets`` are those of treadle's name."""

    type: Literal["gauge", "counter", "histogram"]
    text: str
    read: Read
    labels: tuple[str, ...] = ("model_name",)
    shown: tuple[str, ...] | None = None
    """The labels of treadle's name, ``None`` for all."""
    buckets: Sequence[float] = ()
    of_engine: bool = True
    """Whether it is not known while the engine does not answer."""


REQUEST_HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (LATENCY, "From arrival to the first token."),
    "inter_token_latency_seconds": (
        SHORT,
        "Between two chunks of a stream; the mean, for each token of an answer that is not streamed.",
    ),
    "request_time_per_output_token_seconds": (
        SHORT,
        "Mean time of a request for each token after the first.",
    ),
    "e2e_request_latency_seconds": (LATENCY, "From arrival to the end of a request."),
    "request_queue_time_seconds": (LATENCY, "From arrival in the engine to the first step."),
    "request_prefill_time_seconds": (LATENCY, "From the first step to the first token."),
    "request_decode_time_seconds": (LATENCY, "From the first token to the last."),
    "request_inference_time_seconds": (LATENCY, "From the first step to the last token."),
    "request_prompt_tokens": (LENGTHS, "Prompt tokens of a request."),
    "request_generation_tokens": (LENGTHS, "Generated tokens of a request."),
    "request_max_num_generation_tokens": (LENGTHS, "Tokens of the longest output of a request."),
    "request_params_n": (COUNTS, "Outputs that a request asks for."),
    "request_params_max_tokens": (LENGTHS, "Tokens that a request allows, if it says so."),
}
"""The histograms of finished requests: buckets and meaning."""

GAUGES = {
    "num_requests_running": ("num_running", "Sequences in the running batch."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait to be admitted."),
    "kv_cache_pages": ("num_pages", "Pages of the KV cache."),
    "kv_cache_pages_used": ("num_used_pages", "Pages in use."),
    "num_grammars_waiting": ("num_grammars_waiting", "Grammars that wait to be compiled."),
}
COUNTERS = {
    "engine_steps": ("num_steps", "Steps of the engine."),
    "engine_step_seconds": ("step_seconds", "Time spent in steps."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests, cached ones included."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "prefix_cache_queries": (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Sequences that were preempted."),
    "integrity_faults": ("integrity_faults", "Violations found by the engine's self-check."),
    "compilations_in_service": (
        "compilations_in_service",
        "Kernels that were compiled or read from disk after the start, while requests waited.",
    ),
    "grammars_compiled": ("grammars_compiled", "Grammars that were compiled."),
    "grammars_failed": ("grammars_failed", "Grammars that could not be compiled."),
    "grammars_rejected": ("grammars_rejected", "Grammars that were refused: too many waited."),
}
CACHES = {
    "cache_entries": ("entries", "Entries of a cache that grows with requests."),
    "cache_entries_max": ("max_entries", "Entries that a cache may have."),
    "cache_bytes": ("bytes", "Bytes of a cache, 0 for one that only its entries bound."),
    "cache_bytes_max": ("max_bytes", "Bytes that a cache may have."),
}


def _stat(field: str) -> Read:
    return lambda metrics, stats: [((metrics.model,), float(getattr(stats, field)))]


def _cache(field: str) -> Read:
    return lambda metrics, stats: [
        ((metrics.model, cache), float(getattr(size, field)))
        for cache, size in stats.caches.items()
    ]


def _request(key: str) -> Read:
    return lambda metrics, _: [
        ((metrics.model, operation), histograms[key])
        for operation, histograms in metrics.requests.items()
    ]


def _cache_usage(metrics: Metrics, stats: EngineStats) -> list[Sample]:
    return [((metrics.model,), stats.num_used_pages / stats.num_pages if stats.num_pages else 0.0)]


def _cache_config(metrics: Metrics, stats: EngineStats) -> list[Sample]:
    return [((metrics.model, str(stats.num_pages), *metrics.cache_config), 1.0)]


def _step_tokens(metrics: Metrics, stats: EngineStats) -> list[Sample]:
    steps = stats.steps_by_tokens
    beyond = sum(count for key, count in steps.items() if key not in STEP_EXPONENTS)
    counts = [*(steps.get(key, 0) for key in STEP_EXPONENTS), beyond]
    bounds = [2.0**key for key in STEP_EXPONENTS]
    return [((metrics.model,), Histogram.of_counts(bounds, counts, float(stats.step_tokens)))]


def _finished(metrics: Metrics, _: EngineStats) -> list[Sample]:
    return [((metrics.model, reason), float(n)) for reason, n in metrics.finished.items()]


def _http_requests(metrics: Metrics, _: EngineStats) -> list[Sample]:
    return [
        ((method, route, str(status), f"{status // 100}xx"), float(count))
        for (method, route, status), count in metrics.http_requests.items()
    ]


MEASURED: dict[str, Measured] = {
    **{key: Measured(type="gauge", text=text, read=_stat(f)) for key, (f, text) in GAUGES.items()},
    "kv_cache_usage_perc": Measured(
        type="gauge", text="Share of pages in use, 0 to 1.", read=_cache_usage
    ),
    "cache_config_info": Measured(
        type="gauge",
        text="1, with what the KV cache is like.",
        read=_cache_config,
        labels=(
            *("model_name", "num_pages", "page_size", "kv_cache_dtype"),
            *("enable_prefix_caching", "gpu_memory_utilization"),
        ),
    ),
    **{
        key: Measured(type="counter", text=text, read=_stat(field))
        for key, (field, text) in COUNTERS.items()
    },
    "engine_step_tokens": Measured(
        type="histogram",
        text="Tokens that a step computes.",
        read=_step_tokens,
        buckets=[2.0**key for key in STEP_EXPONENTS],
    ),
    **{
        key: Measured(type="gauge", text=text, read=_cache(field), labels=("model_name", "cache"))
        for key, (field, text) in CACHES.items()
    },
    "request_success": Measured(
        type="counter",
        text="Outputs of requests by the reason of their end, errors and aborts included.",
        read=_finished,
        labels=("model_name", "finished_reason"),
        of_engine=False,
    ),
    **{
        key: Measured(
            type="histogram",
            text=text,
            read=_request(key),
            labels=("model_name", "operation"),
            shown=("model_name",),
            buckets=buckets,
            of_engine=False,
        )
        for key, (buckets, text) in REQUEST_HISTOGRAMS.items()
    },
    "http_requests": Measured(
        type="counter",
        text="HTTP requests.",
        read=_http_requests,
        labels=("method", "route", "status", "status_class"),
        shown=("method", "route", "status"),
        of_engine=False,
    ),
    "http_request_seconds": Measured(
        type="histogram",
        text="Time to answer, streams to their end.",
        read=lambda metrics, _: [((r,), h) for r, h in metrics.http_seconds.items()],
        labels=("route",),
        buckets=LATENCY,
        of_engine=False,
    ),
}
"""By the key that treadle's own name is made of, ``treadle_KEY``."""
