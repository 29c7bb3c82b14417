"""The names of ``/metrics``: a valid page, one value under many names, and names of a plugin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exposition import Page, of, one, samples
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from scripted import ScriptedEngine
from serving import Server, events, serving

from treadle.api.stats import EngineStats
from treadle.config import PluginConfig
from treadle.errors import PluginLoadError
from treadle.outputs import RequestMetrics, RequestOutput
from treadle.plugins import PluginManager
from treadle_server import MetricName
from treadle_server.app import build
from treadle_server.metric_names import gen_ai_names, vllm_names
from treadle_server.metric_values import MEASURED
from treadle_server.metrics import TREADLE_NAMES, Metrics

COUNTED = ("_total", "_count", "_bucket", "_sum", "_created")


class TimedEngine(ScriptedEngine):
    """Outputs have the times of an engine: 0.5 s in the queue, 0.25 s of prefill, 0.3 s of decoding."""

    def _output(self, *arguments: Any) -> RequestOutput:
        output = super()._output(*arguments)
        now = time.monotonic()
        output.metrics = RequestMetrics(
            arrival_time=now,
            scheduled_time=now + 0.5,
            first_token_time=now + 0.75,
            last_token_time=now + 1.05,
        )
        return output


async def scrape(server: Server) -> Page:
    return samples((await server.client.get("/metrics")).text)


async def use(server: Server) -> None:
    """Two streams, two whole answers of two outputs, a completion, a refusal."""
    for _ in range(2):
        events((await server.chat(stream=True)).text)
        await server.chat(n=2, max_tokens=3)
    await server.complete()
    await server.complete(n=0)


async def test_a_page_is_valid_and_its_counters_never_fall() -> None:
    async with serving(TimedEngine()) as server:
        before = await scrape(server)
        await use(server)
        after = await scrape(server)
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        answer = await server.client.get("/metrics", headers=accept)
    assert before.keys() <= after.keys()
    for (name, labels), value in before.items():
        if name.endswith(COUNTED):
            assert after[name, labels] >= value, name
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = list(parse_openmetrics(answer.text))
    assert len(families) == len({family.name for family in families}) > 80


async def test_every_name_says_the_same() -> None:
    async with serving(TimedEngine()) as server:
        await use(server)
        page = await scrape(server)
    engine = {"model_name": "scripted", "engine": "0"}
    for name in vllm_names(1000):
        if not name.name.startswith("vllm:"):
            continue
        ours = next(own for own in TREADLE_NAMES if own.value == name.value)
        suffix = {"counter": "_total", "histogram": "_count"}.get(MEASURED[name.value].type, "")
        values = of(page, name.family + suffix, **engine).values()
        assert sorted(values) == sorted(of(page, ours.family + suffix).values()), name
    assert one(page, "vllm:request_success_total", finished_reason="stop") == 3
    assert one(page, "vllm:request_success_total", finished_reason="length") == 4
    assert one(page, "vllm:request_success_total", finished_reason="abort") == 0
    for name, seconds in {"queue": 0.5, "prefill": 0.25, "decode": 0.3, "inference": 0.55}.items():
        assert one(page, f"vllm:request_{name}_time_seconds_count") == 5
        assert one(page, f"vllm:request_{name}_time_seconds_sum") == pytest.approx(5 * seconds)
    assert one(page, "vllm:request_params_n_bucket", le="1.0") == 3
    assert one(page, "vllm:request_params_n_bucket", le="2.0") == 5
    assert (
        one(page, "vllm:request_params_max_tokens_count") == 3
    )  # 16 is the default of completions
    assert one(page, "vllm:cache_config_info", block_size="16", num_gpu_blocks="10") == 1
    operations = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "scripted"}
    assert one(page, "gen_ai_server_request_duration_seconds_count", **operations) == 4
    assert one(page, "http_requests_total", handler="/v1/completions", status="4xx") == 1
    assert one(page, "http_request_duration_seconds_count", handler="/v1/completions") == 2


def test_buckets_are_those_that_dashboards_know() -> None:
    metrics = Metrics("m", names=[*TREADLE_NAMES, *vllm_names(300), *gen_ai_names()])
    metrics.requests["chat"]["e2e_request_latency_seconds"].observe(0.4)
    page = samples(metrics.exposition(EngineStats(steps_by_tokens={0: 1, 4: 2, 20: 3}))[0].decode())

    def bounds(name: str) -> list[str]:
        return [dict(labels)["le"] for labels in of(page, f"{name}_bucket")]

    assert bounds("vllm:request_prompt_tokens")[:9] == (
        ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]
    )
    assert bounds("vllm:e2e_request_latency_seconds")[:3] == ["0.3", "0.5", "0.8"]
    assert one(page, "vllm:e2e_request_latency_seconds_bucket", le="0.3") == 0
    assert one(page, "vllm:e2e_request_latency_seconds_bucket", le="0.5") == 1
    assert one(page, "treadle_e2e_request_latency_seconds_bucket", le="0.25") == 0
    assert len(bounds("vllm:iteration_tokens_total")) == 14
    assert one(page, "vllm:iteration_tokens_total_bucket", le="8.0") == 1
    assert one(page, "vllm:iteration_tokens_total_bucket", le="16.0") == 3
    assert one(page, "vllm:iteration_tokens_total_count") == 6
    duration = set(bounds("gen_ai_server_request_duration_seconds"))
    assert {"0.01", "0.64", "81.92", "+Inf"} <= duration and len(duration) == 15


@pytest.mark.parametrize(
    ("options", "prefixes"),
    [
        ({"metric_names": ["treadle"]}, {"treadle"}),
        ({"metric_names": ["vllm"]}, {"treadle", "vllm", "http"}),
        ({"metric_names": ["treadle", "gen_ai"]}, {"treadle", "gen"}),
    ],
)
async def test_names_are_chosen(options: dict[str, Any], prefixes: set[str]) -> None:
    async with serving(**options, enable_plugin_metrics=False) as server:
        await use(server)
        page = await scrape(server)
    found = {name.partition(":")[0].partition("_")[0] for name, _ in page}
    assert found == prefixes | {"process"}
    assert not [name for name, _ in page if name.startswith("treadle_plugin")]
    has_own = any(name == "treadle_num_requests_running" for name, _ in page)
    assert has_own == ("treadle" in options["metric_names"])


async def test_an_end_has_a_reason_however_it_comes() -> None:
    def fail(engine: ScriptedEngine, step: int) -> None:
        raise ValueError("it fails")

    async with serving(ScriptedEngine(before=fail)) as server:
        await server.chat()
        await server.chat(stream=True)
        page = await scrape(server)
    assert one(page, "vllm:request_success_total", finished_reason="error") == 2
    for reason in ("stop", "abort"):
        assert one(page, "vllm:request_success_total", finished_reason=reason) == 0
    async with serving(ScriptedEngine(reason="error")) as server:
        await server.chat(n=3)
        await server.chat(stream=True)
        page = await scrape(server)
    assert one(page, "vllm:request_success_total", finished_reason="error") == 4


# ------------------------------------------------------------------------------ of a plugin

SGLANG = """
from treadle.api import impl

TREADLE = {"server": ["sglang"]}

@impl
def treadle_server(app):
    from treadle_server import MetricName

    app.state.metric_names += [NAMES]
"""
RUNNING = 'MetricName(name="sglang:num_running_reqs", value="num_requests_running")'
FIRST = (
    'MetricName(name="sglang:time_to_first_token_seconds", value="time_to_first_token_seconds", '
    "buckets=(0.2, 0.6, 4.0))"
)


def with_names(folder: Path, *names: str) -> ScriptedEngine:
    file = folder / "sglang_names.py"
    file.write_text(SGLANG.replace("NAMES", ", ".join(names)))
    return TimedEngine(plugins=PluginManager(PluginConfig(plugin_file=[str(file)])))


async def test_a_plugin_serves_names_of_its_own(tmp_path: Path) -> None:
    async with serving(with_names(tmp_path, RUNNING, FIRST)) as server:
        await server.chat()
        page = await scrape(server)
    assert one(page, "sglang:num_running_reqs", model_name="scripted") == 0
    buckets = of(page, "sglang:time_to_first_token_seconds_bucket")
    assert [dict(labels)["le"] for labels in buckets][:3] == ["0.2", "0.6", "4.0"]
    assert one(page, "sglang:time_to_first_token_seconds_count", model_name="scripted") == 1
    assert one(page, "vllm:time_to_first_token_seconds_count", model_name="scripted") == 1


async def test_a_reload_keeps_what_was_counted(tmp_path: Path) -> None:
    async with serving(with_names(tmp_path, RUNNING, FIRST)) as server:
        await use(server)
        await scrape(server)
        before = await scrape(server)
        context = server.context
        app = build(context, context.engine.plugins)
        await app.start()
        context.use_plugins(context.engine.plugins, app)
        await use(server)
        after = await scrape(server)
        (tmp_path / "other").mkdir()
        other = with_names(tmp_path / "other", RUNNING, FIRST.replace("4.0", "4.5")).plugins
        with pytest.raises(PluginLoadError, match=r"4\.5.* not counted"):
            build(context, other)
        assert (await scrape(server)).keys() == after.keys() == before.keys()
    success = {"finished_reason": "stop"}
    ends = [one(page, "vllm:request_success_total", **success) for page in (before, after)]
    assert ends[1] == 2 * ends[0] > 0
    counted = "sglang:time_to_first_token_seconds_count"
    assert one(after, counted) == 2 * one(before, counted) > 0


def wrong_names() -> Iterator[tuple[str, str]]:
    yield RUNNING.replace("num_requests_running", "heat"), "which is not measured"
    yield RUNNING.replace("sglang:num", "2 sglang"), "not a valid name"
    yield RUNNING.replace("sglang:num_running_reqs", "vllm:num_requests_running"), "exists already"
    yield RUNNING.replace("sglang:num_running_reqs", "treadle_x"), "exists already"
    yield RUNNING.replace(")", ", labels={'a': 'b'})"), "asks for the labels"
    yield RUNNING.replace(")", ", constants={'le': 'b'})"), "not a valid label"
    yield '"sglang:num_running_reqs"', "must be MetricName"
    steps = 'MetricName(name="s", value="engine_step_tokens", buckets=(3.0,))'
    yield steps, "not counted"


@pytest.mark.parametrize(("name", "message"), list(wrong_names()))
async def test_a_wrong_name_of_a_plugin_ends_the_start(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(Exception, match=message) as error:
        async with serving(with_names(tmp_path, name)):
            pass
    assert "server:sglang" in str(error.value)


def test_all_names_of_a_plugin_are_checked_against_each_other() -> None:
    name = MetricName(name="a_total", value="prompt_tokens")
    with pytest.raises(ValueError, match="exists already"):
        Metrics("m", names=[name, MetricName(name="a", value="prompt_tokens")])
