"""``/metrics``: the engine's stats and the server's measurements.

Every label comes from a closed set: no client can add a series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from treadle.api.stats import EngineStats
from treadle.plugins.call_stats import PluginCallStats
from treadle_server.child_processes import resident_bytes
from treadle_server.histogram import LATENCY, LENGTHS, SHORT, Histogram

__all__ = ("METHODS", "Metrics")

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})

GAUGES: tuple[tuple[str, str, str], ...] = (
    ("num_requests_running", "num_running", "Sequences in the running batch."),
    ("num_requests_waiting", "num_waiting", "Sequences that wait to be admitted."),
    ("kv_cache_pages", "num_pages", "Pages of the KV cache."),
    ("kv_cache_pages_used", "num_used_pages", "Pages in use."),
    ("num_grammars_waiting", "num_grammars_waiting", "Grammars that wait to be compiled."),
)
CACHES: tuple[tuple[str, str, str], ...] = (
    ("cache_entries", "entries", "Entries of a cache that grows with requests."),
    ("cache_entries_max", "max_entries", "Entries that a cache may have."),
    ("cache_bytes", "bytes", "Bytes of a cache, 0 for one that only its entries bound."),
    ("cache_bytes_max", "max_bytes", "Bytes that a cache may have."),
)
COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("engine_steps", "num_steps", "Steps of the engine."),
    ("engine_step_seconds", "step_seconds", "Time spent in steps."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens."),
    ("generation_tokens", "generation_tokens", "Generated tokens."),
    (
        "prefix_cache_queries",
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "num_preemptions", "Sequences that were preempted."),
    ("integrity_faults", "integrity_faults", "Violations found by the engine's self-check."),
    ("grammars_compiled", "grammars_compiled", "Grammars that were compiled."),
    ("grammars_failed", "grammars_failed", "Grammars that could not be compiled."),
    ("grammars_rejected", "grammars_rejected", "Grammars that were refused: too many waited."),
)


class Metrics:
    """The counters of one server, and a Prometheus collector of them. Not thread-safe."""

    def __init__(self, model: str, call_stats: PluginCallStats | None = None) -> None:
        """``call_stats`` is of the plugins that are called in this process."""
        self.time_to_first_token = Histogram(LATENCY)
        self.inter_token = Histogram(SHORT)
        self.latency = Histogram(LATENCY)
        self.prompt_lengths = Histogram(LENGTHS)
        self.output_lengths = Histogram(LENGTHS)
        self.active = 0
        self.stuck_threads = 0
        self.stored_responses = self.stored_response_bytes = 0
        self._http: Counter[tuple[str, str, int]] = Counter()
        self._http_seconds: dict[str, Histogram] = {}
        self._parser_failures: Counter[str] = Counter()
        self._stats: EngineStats | None = None
        self._states: Mapping[str, str] = {}
        self._call_stats = call_stats or PluginCallStats()
        self._label = [model]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count_parser_failure(self, parser: str) -> None:
        """Count an exception of ``kind=name``; both come from the server's options."""
        self._parser_failures[parser] += 1

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one HTTP request. ``route`` is a route's template or ``other``."""
        self._http[method if method in METHODS else "other", route, status] += 1
        histogram = self._http_seconds.get(route)
        if histogram is None:
            histogram = self._http_seconds[route] = Histogram(LATENCY)
        histogram.observe(seconds)

    def exposition(
        self, stats: EngineStats | None, states: Mapping[str, str] | None = None
    ) -> bytes:
        """The page. ``stats`` is ``None`` if the engine does not answer; ``states`` are those of the
        plugins in this process."""
        self._stats, self._states = stats, states or {}
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._engine()
        yield from self._plugins()
        yield from self._requests()
        yield from self._server()

    def _engine(self) -> Iterator[Metric]:
        names, label, stats = ["model_name"], self._label, self._stats
        engine_up = GaugeMetricFamily(
            "treadle_engine_up", "Whether the engine answers.", labels=names
        )
        engine_up.add_metric(label, float(stats is not None))
        yield engine_up
        if stats is None:
            return
        for name, field, text in GAUGES:
            gauge = GaugeMetricFamily(f"treadle_{name}", text, labels=names)
            gauge.add_metric(label, float(getattr(stats, field)))
            yield gauge
        usage = GaugeMetricFamily(
            "treadle_kv_cache_usage_perc", "Share of pages in use.", labels=names
        )
        usage.add_metric(label, stats.num_used_pages / stats.num_pages if stats.num_pages else 0.0)
        yield usage
        for name, field, text in COUNTERS:
            counter = CounterMetricFamily(f"treadle_{name}", text, labels=names)
            counter.add_metric(label, float(getattr(stats, field)))
            yield counter
        finished = CounterMetricFamily(
            "treadle_request_success",
            "Finished sequences by reason, errors and aborts included.",
            labels=[*names, "finished_reason"],
        )
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([*label, reason], float(count))
        yield finished
        for name, field, text in CACHES:
            gauge = GaugeMetricFamily(f"treadle_{name}", text, labels=[*names, "cache"])
            for cache, size in stats.caches.items():
                gauge.add_metric([*label, cache], float(getattr(size, field)))
            yield gauge

    def _plugins(self) -> Iterator[Metric]:
        """What the engine's process and this one have called, added up."""
        names, stats = ["model_name", "plugin"], self._stats or EngineStats()
        counts: Counter[tuple[str, str, str]] = Counter()
        for plugin, hook, outcome, count in [*stats.plugin_calls, *self._call_stats.rows()]:
            counts[plugin, hook, outcome] += count
        calls = CounterMetricFamily(
            "treadle_plugin_calls", "Calls of plugins.", labels=[*names, "hook", "outcome"]
        )
        for (plugin, hook, outcome), count in counts.items():
            calls.add_metric([*self._label, plugin, hook, outcome], float(count))
        yield calls
        times: dict[tuple[str, str], tuple[int, float]] = {}
        for plugin, hook, count, seconds in [*stats.plugin_seconds, *self._call_stats.seconds()]:
            previous = times.get((plugin, hook), (0, 0.0))
            times[plugin, hook] = previous[0] + count, previous[1] + seconds
        durations = SummaryMetricFamily(
            "treadle_plugin_seconds", "Time in calls of plugins.", labels=[*names, "hook"]
        )
        for (plugin, hook), (count, seconds) in times.items():
            durations.add_metric([*self._label, plugin, hook], count, seconds)
        yield durations
        states = GaugeMetricFamily(
            "treadle_plugin_state",
            "1 for the state of each plugin that the engine or the server has imported.",
            labels=[*names, "state"],
        )
        broken = {plugin: state for plugin, state in self._states.items() if state == "broken"}
        for plugin, state in sorted({**self._states, **stats.plugin_states, **broken}.items()):
            states.add_metric([*self._label, plugin, state], 1.0)
        yield states

    def _requests(self) -> Iterator[Metric]:
        for name, histogram, text in (
            (
                "time_to_first_token_seconds",
                self.time_to_first_token,
                "From arrival to the first token.",
            ),
            ("inter_token_latency_seconds", self.inter_token, "Between two chunks of a stream."),
            ("e2e_request_latency_seconds", self.latency, "From arrival to the end of a request."),
            ("request_prompt_tokens", self.prompt_lengths, "Prompt tokens of a request."),
            ("request_generation_tokens", self.output_lengths, "Generated tokens of a request."),
        ):
            family = HistogramMetricFamily(f"treadle_{name}", text, labels=["model_name"])
            family.add_metric(self._label, histogram.buckets(), histogram.sum)
            yield family

    def _server(self) -> Iterator[Metric]:
        active = GaugeMetricFamily("treadle_http_requests_active", "HTTP requests being answered.")
        active.add_metric([], float(self.active))
        yield active
        requests = CounterMetricFamily(
            "treadle_http_requests", "HTTP requests.", labels=["method", "route", "status"]
        )
        for (method, route, status), count in self._http.items():
            requests.add_metric([method, route, str(status)], float(count))
        yield requests
        seconds = HistogramMetricFamily(
            "treadle_http_request_seconds",
            "Time to answer, streams to their end.",
            labels=["route"],
        )
        for route, histogram in self._http_seconds.items():
            seconds.add_metric([route], histogram.buckets(), histogram.sum)
        yield seconds
        failures = CounterMetricFamily(
            "treadle_parser_failures", "Exceptions of output parsers.", labels=["parser"]
        )
        for parser, count in self._parser_failures.items():
            failures.add_metric([parser], float(count))
        yield failures
        stuck = GaugeMetricFamily(
            "treadle_parser_threads_hung", "Threads that output parsers do not give back."
        )
        stuck.add_metric([], float(self.stuck_threads))
        yield stuck
        resident = GaugeMetricFamily(
            "treadle_process_resident_bytes",
            "Memory of the server's processes by what they do, shared pages included.",
            labels=["process"],
        )
        for process, size in resident_bytes().items():
            resident.add_metric([process], float(size))
        yield resident
        for name, value, text in (
            ("stored_responses", self.stored_responses, "Responses that are kept."),
            (
                "stored_response_bytes",
                self.stored_response_bytes,
                "Bytes of responses that are kept.",
            ),
        ):
            stored = GaugeMetricFamily(f"treadle_{name}", text)
            stored.add_metric([], float(value))
            yield stored
