"""Under which names ``/metrics`` serves what was measured: treadle's, vLLM's, OpenTelemetry's.

Everything is measured once (``treadle_server.metric_values``); a name is a line of a table, with labels
and buckets of its own. A server plugin adds lines to ``app.state.metric_names``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

import msgspec

from treadle_server.metric_values import MEASURED, RESERVED

__all__ = ("MetricName", "gen_ai_names", "vllm_names")

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
MAX_NAMES = 1000

LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
OUTPUT_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
STEP_TOKENS = (1.0, 8.0, *(2.0**i for i in range(4, 15)))
NUM_OUTPUTS = (1.0, 2.0, 5.0, 10.0, 20.0)
DURATION = tuple(round(0.01 * 2**i, 2) for i in range(14))
"""The buckets that the semantic conventions advise for the duration of a request."""


class MetricName(msgspec.Struct, frozen=True, kw_only=True):
    """A name for a measured value, which is a key of ``MEASURED``: ``num_requests_running``.

    ``labels`` maps each label of the name to one of the value; values are summed over those left
    out, and ``None`` takes those of treadle's name. ``constants`` are labels that never change. A
    counter's name ends in ``_total`` on the page, whether it does here or not.
    """

    name: str
    value: str
    text: str = ""
    labels: Mapping[str, str] | None = None
    constants: Mapping[str, str] = {}
    buckets: tuple[float, ...] | None = None

    def check(self, taken: Iterable[str]) -> None:
        """Raise ``ValueError`` unless the page may have this name; ``taken`` are in use."""
        measured = MEASURED.get(self.value)
        if measured is None:
            known = ", ".join(sorted(MEASURED))
            raise ValueError(
                f"the metric {self.name!r} is of {self.value!r}, which is not measured; measured are: {known}"
            )
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a valid name of a metric")
        if self.family in taken or self.name.startswith(RESERVED):
            raise ValueError(f"the metric {self.name!r} exists already; choose another name")
        for label in (*(self.labels or {}), *self.constants):
            if not LABEL.fullmatch(label) or label.startswith("__") or label == "le":
                raise ValueError(f"{label!r} is not a valid label of the metric {self.name!r}")
        if unknown := set((self.labels or {}).values()) - set(measured.labels):
            raise ValueError(
                f"the metric {self.name!r} asks for the labels {sorted(unknown)}; {self.value} has "
                f"{', '.join(measured.labels)}"
            )

    @property
    def family(self) -> str:
        """The name without the suffix of counters, which the page appends."""
        is_counter = (measured := MEASURED.get(self.value)) and measured.type == "counter"
        return self.name.removesuffix("_total") if is_counter else self.name


def vllm_names(max_model_len: int) -> list[MetricName]:
    """Return vLLM's names, those of its versions before 0.9 included, with its labels and buckets."""
    lengths = _one_two_five(max_model_len)
    gauges = {
        "num_requests_running": "num_requests_running",
        "num_requests_waiting": "num_requests_waiting",
        "kv_cache_usage_perc": "kv_cache_usage_perc",
        "gpu_cache_usage_perc": "kv_cache_usage_perc",
    }
    counters = {
        "prompt_tokens": "prompt_tokens",
        "generation_tokens": "generation_tokens",
        "prefix_cache_queries": "prefix_cache_queries",
        "prefix_cache_hits": "prefix_cache_hits",
        "gpu_prefix_cache_queries": "prefix_cache_queries",
        "gpu_prefix_cache_hits": "prefix_cache_hits",
        "num_preemptions": "num_preemptions",
        "request_success": "request_success",
    }
    histograms = {
        "time_to_first_token_seconds": ("time_to_first_token_seconds", FIRST_TOKEN),
        "inter_token_latency_seconds": ("inter_token_latency_seconds", OUTPUT_TOKEN),
        "time_per_output_token_seconds": ("inter_token_latency_seconds", OUTPUT_TOKEN),
        "request_time_per_output_token_seconds": (
            "request_time_per_output_token_seconds",
            OUTPUT_TOKEN,
        ),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds", LATENCY),
        "request_queue_time_seconds": ("request_queue_time_seconds", LATENCY),
        "request_inference_time_seconds": ("request_inference_time_seconds", LATENCY),
        "request_prefill_time_seconds": ("request_prefill_time_seconds", LATENCY),
        "request_decode_time_seconds": ("request_decode_time_seconds", LATENCY),
        "request_prompt_tokens": ("request_prompt_tokens", lengths),
        "request_generation_tokens": ("request_generation_tokens", lengths),
        "request_max_num_generation_tokens": ("request_max_num_generation_tokens", lengths),
        "request_params_n": ("request_params_n", NUM_OUTPUTS),
        "request_params_max_tokens": ("request_params_max_tokens", lengths),
        "iteration_tokens_total": ("engine_step_tokens", STEP_TOKENS),
    }
    engine = {"engine": "0"}
    plain = [
        MetricName(name=f"vllm:{name}", value=value, constants=engine)
        for name, value in {**gauges, **counters}.items()
    ]
    timed = [
        MetricName(name=f"vllm:{name}", value=value, buckets=buckets, constants=engine)
        for name, (value, buckets) in histograms.items()
    ]
    cache = MetricName(
        name="vllm:cache_config_info",
        value="cache_config_info",
        labels={
            "model_name": "model_name",
            "block_size": "page_size",
            "num_gpu_blocks": "num_pages",
            "cache_dtype": "kv_cache_dtype",
            "enable_prefix_caching": "enable_prefix_caching",
            "gpu_memory_utilization": "gpu_memory_utilization",
        },
        constants=engine,
    )
    http = [
        MetricName(
            name="http_requests",
            value="http_requests",
            labels={"handler": "route", "method": "method", "status": "status_class"},
        ),
        MetricName(
            name="http_request_duration_seconds",
            value="http_request_seconds",
            labels={"handler": "route"},
            buckets=(0.1, 0.5, 1.0),
        ),
    ]
    return [*plain, *timed, cache, *http]


def gen_ai_names() -> list[MetricName]:
    """Return the names of OpenTelemetry's semantic conventions for servers, as Prometheus writes them."""
    values = {
        "request_duration_seconds": ("e2e_request_latency_seconds", DURATION),
        "time_to_first_token_seconds": ("time_to_first_token_seconds", FIRST_TOKEN[:16]),
        "time_per_output_token_seconds": (
            "request_time_per_output_token_seconds",
            OUTPUT_TOKEN[:13],
        ),
    }
    labels = {"gen_ai_request_model": "model_name", "gen_ai_operation_name": "operation"}
    return [
        MetricName(
            name=f"gen_ai_server_{name}",
            value=value,
            labels=labels,
            constants={"gen_ai_provider_name": "treadle"},
            buckets=buckets,
        )
        for name, (value, buckets) in values.items()
    ]


def _one_two_five(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20 … up to ``limit``."""
    series = (float(m * 10**e) for e in itertools.count() for m in (1, 2, 5))
    return tuple(itertools.takewhile(lambda bound: bound <= limit, series))
