"""``/metrics``: the engine's stats and the server's measurements, under the names that were chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder

from treadle.api.stats import EngineStats
from treadle.plugins.call_stats import PluginCallStats
from treadle_server.child_processes import resident_bytes
from treadle_server.histogram import Histogram
from treadle_server.metric_names import MAX_NAMES, MetricName
from treadle_server.metric_values import (
    MEASURED,
    OPERATIONS,
    REQUEST_HISTOGRAMS,
    Measured,
    Sample,
)
from treadle_server.outcomes import RequestOutcomes

__all__ = ("METHODS", "TREADLE_NAMES", "Metrics")

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
FINISH_REASONS = ("stop", "length", "abort", "error")
TREADLE_NAMES = tuple(
    MetricName(name=f"treadle_{key}", value=key, buckets=tuple(m.buckets) or None)
    for key, m in MEASURED.items()
)


class Metrics:
    """The counters of one server, and a Prometheus collector of them. Not thread-safe."""

    def __init__(
        self,
        model: str,
        call_stats: PluginCallStats | None = None,
        *,
        names: Sequence[MetricName] = TREADLE_NAMES,
        cache_config: Sequence[str] = ("", "", "", ""),
        of_plugins: bool = True,
    ) -> None:
        """``call_stats`` is of the plugins that are called in this process, and served only
        ``of_plugins``. ``cache_config`` are the values of the label of ``cache_config_info`` after the
        number of pages."""
        self.model, self.cache_config = model, tuple(cache_config)
        self.active = 0
        self.outcomes = RequestOutcomes()
        self.stuck_threads = 0
        self.stored_responses = self.stored_response_bytes = 0
        self.http_requests: Counter[tuple[str, str, int]] = Counter()
        self.http_seconds: dict[str, Histogram] = {}
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._parser_failures: Counter[str] = Counter()
        self._stats: EngineStats | None = None
        self._states: Mapping[str, str] = {}
        self._call_stats = call_stats or PluginCallStats()
        self._of_plugins = of_plugins
        self._label = [model]
        self._bounds = {key: frozenset(measured.buckets) for key, measured in MEASURED.items()}
        self.requests: dict[str, dict[str, Histogram]] = {operation: {} for operation in OPERATIONS}
        self.names = self.checked(names, may_grow=True)
        self._shown: Sequence[MetricName] = self.names
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def checked(
        self, names: Iterable[MetricName], *, may_grow: bool = False
    ) -> tuple[MetricName, ...]:
        """Return names that the page can have, beside treadle's. Raises ``TypeError`` or ``ValueError``.

        Only with ``may_grow``, which forgets what was observed, may they have new buckets.
        """
        names = tuple(names)
        if len(names) > MAX_NAMES:
            raise ValueError(f"{len(names)} names of metrics; at most {MAX_NAMES} are allowed")
        taken: set[str] = set()
        for name in names:
            if not isinstance(name, MetricName):
                raise TypeError(f"metric_names has a {type(name).__name__}; it must be MetricName")
            if name not in TREADLE_NAMES:
                name.check(taken)
            taken.add(name.family)
            missing = frozenset(name.buckets or ()) - self._bounds[name.value]
            if missing and (not may_grow or MEASURED[name.value].of_engine):
                raise ValueError(
                    f"the metric {name.name!r} has the buckets {sorted(missing)}, which are not counted "
                    f"for {name.value}; counted are: {sorted(self._bounds[name.value])}"
                )
            self._bounds[name.value] |= missing
        if may_grow:
            for operation in OPERATIONS:
                self.requests[operation] = {
                    key: Histogram(self._bounds[key]) for key in REQUEST_HISTOGRAMS
                }
        return names

    def count_parser_failure(self, parser: str) -> None:
        """Count an exception of ``kind=name``; both come from the server's options."""
        self._parser_failures[parser] += 1

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one HTTP request. ``route`` is a route's template or ``other``."""
        self.http_requests[method if method in METHODS else "other", route, status] += 1
        histogram = self.http_seconds.get(route)
        if histogram is None:
            histogram = Histogram(self._bounds["http_request_seconds"])
            self.http_seconds[route] = histogram
        histogram.observe(seconds)

    def exposition(
        self,
        stats: EngineStats | None,
        states: Mapping[str, str] | None = None,
        names: Sequence[MetricName] | None = None,
        accept: str = "",
    ) -> tuple[bytes, str]:
        """Return the page and its media type, for what a client accepts.

        ``stats`` is ``None`` if the engine does not answer; ``states`` are those of the plugins in
        this process.
        """
        self._stats, self._states = stats, states or {}
        self._shown = self.names if names is None else names
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def collect(self) -> Iterable[Metric]:
        label, stats = self._label, self._stats
        engine_up = GaugeMetricFamily(
            "treadle_engine_up", "Whether the engine answers.", labels=["model_name"]
        )
        engine_up.add_metric(label, float(stats is not None))
        yield engine_up
        by_value: dict[str, list[MetricName]] = {}
        for name in self._shown:
            by_value.setdefault(name.value, []).append(name)
        for key, named in by_value.items():
            measured = MEASURED[key]
            if stats is None and measured.of_engine:
                continue
            samples = list(measured.read(self, stats or EngineStats()))
            for name in named:
                yield _family(name, measured, samples)
        if self._of_plugins:
            yield from self._plugins()
        yield from self._server()

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

    def _server(self) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            "treadle_parser_failures", "Exceptions of output parsers.", labels=["parser"]
        )
        for parser, count in self._parser_failures.items():
            failures.add_metric([parser], float(count))
        yield failures
        resident = GaugeMetricFamily(
            "treadle_process_resident_bytes",
            "Memory of the server's processes by what they do, shared pages included.",
            labels=["process"],
        )
        for process, size in resident_bytes().items():
            resident.add_metric([process], float(size))
        yield resident
        for name, value, text in (
            ("http_requests_active", self.active, "HTTP requests being answered."),
            (
                "parser_threads_hung",
                self.stuck_threads,
                "Threads that output parsers do not give back.",
            ),
            ("stored_responses", self.stored_responses, "Responses that are kept."),
            (
                "stored_response_bytes",
                self.stored_response_bytes,
                "Bytes of responses that are kept.",
            ),
        ):
            gauge = GaugeMetricFamily(f"treadle_{name}", text)
            gauge.add_metric([], float(value))
            yield gauge


def _family(name: MetricName, measured: Measured, samples: Iterable[Sample]) -> Metric:
    """Return what was measured under one of its names, summed over the labels that it lacks."""
    shown = measured.labels if measured.shown is None else measured.shown
    sources = {label: label for label in shown} if name.labels is None else name.labels
    columns = [measured.labels.index(source) for source in sources.values()]
    labels, constants = [*sources, *name.constants], tuple(name.constants.values())
    sums: dict[tuple[str, ...], Any] = {}
    for values, value in samples:
        key = (*(values[column] for column in columns), *constants)
        sums[key] = sums[key] + value if key in sums else value
    text = name.text or measured.text
    if measured.type == "histogram":
        histograms = HistogramMetricFamily(name.family, text, labels=labels)
        for key, histogram in sums.items():
            histograms.add_metric(key, histogram.buckets(name.buckets), histogram.sum)
        return histograms
    create = CounterMetricFamily if measured.type == "counter" else GaugeMetricFamily
    family = create(name.family, text, labels=labels)
    for key, number in sums.items():
        family.add_metric(key, number)
    return family
