"""Traces: what a collector gets of each request, and that none of it harms a request."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from collector import Collector, Span, collecting
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from process import served
from scripted import ScriptedEngine
from serving import serving, until

from treadle.config import PluginConfig
from treadle.errors import ConfigError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.plugin import PluginSuite
from treadle_server.observers import FinishedPrompt
from treadle_server.testing.plugins import ServerSuite

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flags}" for flags in ("01", "00"))
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
MARKS = {gen_ai_attributes.__dict__[n] for n in dir(gen_ai_attributes) if n.startswith("GEN_AI_")}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def traced(endpoint: str | None, **options: Any) -> PluginManager:
    own = {"server:opentelemetry": {"endpoint": endpoint, **options}}
    return PluginManager(PluginConfig(plugin_options=own))


def engine(collector: Collector, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(plugins=traced(collector.url, **options))


def is_sampled(traceparent: str) -> bool:
    """The lowest bit of the flags; the next one says that the id of the trace is random."""
    return bool(int(traceparent.rpartition("-")[2], 16) & 1)


def is_child(traceparent: str, span: Span) -> bool:
    """Whether the header names ``span`` as the parent of what comes after it."""
    return traceparent.startswith(f"00-{span.trace_id}-{span.id}-") and is_sampled(traceparent)


class TestConformance(PluginSuite, ServerSuite):
    plugin = "server:opentelemetry"

    @pytest.fixture(autouse=True)
    def endpoint(self, collector: Collector) -> None:
        self.options = {"endpoint": collector.url}


# ------------------------------------------------------------------------------------ spans


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_that_generates_has_a_span_of_its_request_and_of_its_prompt(
    path: str, stream: bool, collector: Collector
) -> None:
    async with serving(engine(collector)) as server:
        body = {**ROUTES[path], "stream": stream, "temperature": 0.5}
        answer = await server.post(path, body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
    operation = "text_completion" if path == "/v1/completions" else "chat"
    request, prompt = collector.named(f"POST {path}", f"{operation} scripted")
    assert request.resource["service.name"] == "treadle"
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["http.route"] == path
    assert request.attributes["treadle.request_id"] == "mine"
    assert prompt.parent_id == request.id and prompt.trace_id == request.trace_id
    assert is_child(answer.headers["traceparent"], request)
    about = prompt.attributes
    assert about["gen_ai.operation.name"] == operation
    assert about["gen_ai.request.model"] == about["gen_ai.response.model"] == "scripted"
    assert about["gen_ai.request.temperature"] == 0.5
    assert about["gen_ai.usage.output_tokens"] == len("Hello world")
    assert about["gen_ai.usage.input_tokens"] > 0
    assert about["gen_ai.usage.cache_read.input_tokens"] == 2
    assert about["gen_ai.response.finish_reasons"] == ["stop"]


@pytest.mark.skipif(
    "gen_ai.usage.cache_read.input_tokens" not in MARKS, reason="conventions of later versions"
)
async def test_the_attributes_are_those_of_the_conventions_and_of_vllm(
    collector: Collector,
) -> None:
    async with serving(engine(collector)) as server:
        more = {"seed": 3, "n": 2, "top_k": 4, "presence_penalty": 1, "frequency_penalty": 1}
        await server.chat(**more)
    (prompt,) = collector.named("chat scripted")
    unknown = {name for name in prompt.attributes if name not in MARKS}
    assert {name.rpartition(".")[0] for name in unknown} == {"gen_ai.latency"}
    assert prompt.attributes["gen_ai.request.choice.count"] == 2
    assert prompt.attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]


async def test_each_prompt_of_a_list_has_a_span(collector: Collector) -> None:
    async with serving(engine(collector)) as server:
        await server.complete(prompt=["a", "bc", "def"])
    prompts = [span for span in collector.spans if span.name == "text_completion scripted"]
    counts = sorted(span.attributes["gen_ai.usage.input_tokens"] for span in prompts)
    (request,) = collector.named("POST /v1/completions")
    assert counts == [1, 2, 3]
    assert {span.parent_id for span in prompts} == {request.id}


async def test_no_text_of_the_client_or_the_model_is_in_a_span(collector: Collector) -> None:
    async with serving(ScriptedEngine(["the-answer"], plugins=traced(collector.url))) as server:
        await server.complete(prompt="the-question", stop="the-stop", user="the-user")
        await server.client.get("/nowhere?secret=the-query")
    assert len(collector.spans) >= 2
    seen = repr([(span.name, span.attributes) for span in collector.spans])
    for word in ("the-question", "the-answer", "the-stop", "the-user", "the-query"):
        assert word not in seen


async def test_probes_and_scrapes_are_not_traced(collector: Collector) -> None:
    async with serving(engine(collector)) as server:
        for path in ("/health", "/ready", "/ping", "/metrics", "/v1/models"):
            assert (await server.client.get(path)).status_code == 200
    assert [span.name for span in collector.spans] == ["GET /v1/models"]


# ------------------------------------------------------------------------------- the caller


async def test_the_trace_of_the_caller_goes_on(collector: Collector) -> None:
    async with serving(engine(collector)) as server:
        headers = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
        answer = await server.client.get("/v1/models", headers=headers)
    (span,) = collector.spans
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    assert is_child(answer.headers["traceparent"], span)
    assert answer.headers["tracestate"] == "vendor=1"


async def test_the_caller_decides_whether_its_request_is_sampled(collector: Collector) -> None:
    async with serving(engine(collector, sample_ratio=0.0)) as server:
        left_out = await server.complete()
        await server.complete(headers={})
        await server.post("/v1/completions", {"prompt": "a"}, headers={"traceparent": SAMPLED})
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert not is_sampled(left_out.headers["traceparent"])
    collector.spans.clear()
    async with serving(engine(collector, sample_ratio=1.0)) as server:
        answer = await server.client.get("/v1/models", headers={"traceparent": NOT_SAMPLED})
    assert collector.spans == []
    assert answer.headers["traceparent"].startswith(f"00-{TRACE_ID}-")


@pytest.mark.parametrize(
    "value", ["", "x", SAMPLED.upper(), SAMPLED + "-x", f"00-{'0' * 32}-{PARENT_ID}-01", "é" * 999]
)
async def test_a_malformed_parent_begins_a_new_trace(value: str, collector: Collector) -> None:
    async with serving(engine(collector)) as server:
        headers = {"traceparent": value.encode()}
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 200
    (span,) = collector.spans
    assert span.parent_id == "" and span.trace_id != TRACE_ID


async def test_two_parents_are_none(collector: Collector) -> None:
    async with serving(engine(collector)) as server:
        head = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\ntraceparent: {SAMPLED}\r\n"
        head += f"traceparent: {SAMPLED}\r\nconnection: close\r\n\r\n"
        assert b" 200 " in await server.raw(head.encode())
    (span,) = collector.spans
    assert span.parent_id == ""


# -------------------------------------------------------------------------------------- ends


async def test_a_refused_request_has_a_span_without_a_prompt(collector: Collector) -> None:
    async with serving(engine(collector)) as server:
        assert (await server.complete(temperature=-1)).status_code == 400
    (span,) = collector.spans
    assert span.attributes["http.response.status_code"] == 400
    assert not span.is_error, "it is the client's"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_engine_is_one_of_both_spans(
    stream: bool, collector: Collector
) -> None:
    def fail(engine: ScriptedEngine, step: int) -> None:
        raise RuntimeError("it breaks")

    broken = ScriptedEngine(before=fail, plugins=traced(collector.url))
    async with serving(broken) as server:
        assert (await server.complete(stream=stream)).status_code == 500
    request, prompt = collector.named("POST /v1/completions", "text_completion scripted")
    assert request.is_error and request.attributes["error.type"] == "500"
    assert prompt.is_error and prompt.attributes["error.type"] == "RuntimeError"
    assert prompt.attributes["gen_ai.response.finish_reasons"] == ["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_client_leaves_is_aborted(stream: bool, collector: Collector) -> None:
    running = engine(collector)
    held = asyncio.Event()

    async def hold(step: int) -> None:
        held.set()
        await asyncio.Event().wait()

    running.hold = hold
    async with serving(running) as server:
        asking = asyncio.create_task(server.complete(stream=stream))
        await held.wait()
        asking.cancel()
        await until(lambda: running.aborted == 1)
        await until(lambda: server.context.metrics.active == 0)
    (prompt,) = collector.named("text_completion scripted")
    assert prompt.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert not prompt.is_error


# ------------------------------------------------------------------------------- collectors


@pytest.mark.parametrize("fault", ["refuses", "fails", "hangs"])
async def test_a_bad_collector_harms_no_request(
    fault: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle_opentelemetry.tracing.CLOSE_SECONDS", 0.1)
    monkeypatch.setattr("opentelemetry.sdk.trace.export.logger", logging.Logger("none"))
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    released = threading.Event()
    url = collector.url if fault != "refuses" else "http://127.0.0.1:1/v1/traces"
    if fault == "fails":
        collector.answer = lambda: 500
    elif fault == "hangs":
        collector.answer = lambda: 200 if released.wait(30) else 500
    try:
        async with serving(ScriptedEngine(plugins=traced(url))) as server:
            answers = [await server.complete() for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
    finally:
        released.set()
        logging.getLogger("opentelemetry").setLevel(logging.NOTSET)


async def test_nothing_is_traced_without_an_endpoint(collector: Collector) -> None:
    threads = threading.active_count()
    async with serving(ScriptedEngine(plugins=traced(None))) as server:
        answer = await server.complete(headers={"traceparent": SAMPLED})
        assert "traceparent" not in answer.headers
        assert server.context.observers.is_empty
    assert threading.active_count() <= threads + 1
    assert collector.spans == []


async def test_the_standard_variables_name_the_collector(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.removesuffix("/v1/traces"))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    async with serving(ScriptedEngine(plugins=traced("env"))) as server:
        await server.client.get("/v1/models")
    (span,) = collector.spans
    assert span.resource["service.name"] == "my-service"


@pytest.mark.parametrize("options", [{"endpoint": "localhost:4317"}, {"sample_ratio": 1.5}])
def test_a_bad_option_is_refused_by_name(options: dict[str, Any]) -> None:
    plugins = PluginManager(PluginConfig(plugin_options={"server:opentelemetry": options}))
    with pytest.raises(ConfigError, match=next(iter(options))):
        plugins.options("server", "opentelemetry")


# ------------------------------------------------------------------------------ a real server


def test_a_real_server_sends_the_times_of_its_engine(collector: Collector, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny", tokenizer=True)
    option = ("--plugin.server.opentelemetry.endpoint", collector.url)
    with served(model, tmp_path / "log", *option, "--served-model-name", "tiny") as server:
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.ends() == 0
    request, prompt = collector.named("POST /v1/completions", "text_completion tiny")
    about, latency = prompt.attributes, "gen_ai.latency."
    assert about["gen_ai.usage.output_tokens"] == 5
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert prompt.events == ["scheduled", "first token"]
    parts = [
        about[latency + n]
        for n in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    ]
    assert all(seconds >= 0 for seconds in parts)
    assert parts[0] + parts[1] == pytest.approx(about[latency + "time_to_first_token"], abs=1e-6)
    assert sum(parts) <= about[latency + "e2e"] + 1e-6 <= request.seconds + 1e-3


# ----------------------------------------------------------------------------- the observers


async def test_an_observer_that_fails_is_not_called_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[FinishedPrompt] = []

    def fail(prompt: FinishedPrompt) -> None:
        seen.append(prompt)
        raise ValueError("it breaks")

    async with serving() as server:
        server.context.observers.add(fail)
        assert [(await server.complete()).status_code for _ in range(2)] == [200, 200]
        assert server.context.observers.is_empty
        server.context.observers.remove(fail)
    assert len(seen) == 1 and "not called again" in caplog.text
