"""A span for each HTTP request, as a middleware; and what lives from the start of a server to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from litestar.enums import ScopeType
from opentelemetry import context as otel_context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from treadle_opentelemetry import TraceOptions
from treadle_opentelemetry.spans import record_prompt

if TYPE_CHECKING:
    from litestar import Litestar
    from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

__all__ = ("Tracing",)

UNTRACED = frozenset({"/health", "/ping", "/ready", "/metrics"})
"""Paths that probes and Prometheus ask every few seconds."""
CLOSE_SECONDS = 3.0
"""Time for the collector to take the last spans when the server ends."""
GIVE_UP_SECONDS = 1.0
"""Time until an export that is told to stop has stopped."""
OWNER = otel_context.create_key("treadle-opentelemetry")
"""Names the ``Tracing`` of an HTTP request: during a reload two of them observe one server."""

W3C = TraceContextTextMapPropagator()


class Tracing:
    """The traces of one application. Before ``lifespan`` has begun, nothing is traced."""

    def __init__(self, server: Any, options: TraceOptions) -> None:
        """``server`` is the ``ServerContext``."""
        self._server, self._options = server, options
        self._tracer: Tracer | None = None

    @asynccontextmanager
    async def lifespan(self, app: Litestar) -> AsyncIterator[None]:
        """Open the exporter and its thread; at the end send what is left, for a few seconds."""
        endpoint = self._options.endpoint
        exporter = OTLPSpanExporter(None if endpoint == "env" else endpoint)
        provider = self._create_provider(exporter)
        self._tracer = provider.get_tracer("treadle")
        self._server.observers.add(self.observe)
        try:
            yield
        finally:
            self._server.observers.remove(self.observe)
            self._tracer = None
            await _close(provider, exporter)

    def _create_provider(self, exporter: SpanExporter) -> TracerProvider:
        ratio = self._options.sample_ratio
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "treadle"}))
        provider = TracerProvider(
            sampler=None if ratio is None else ParentBased(TraceIdRatioBased(ratio)),
            resource=resource,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return provider

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Wrap ``app`` in a span for each request that is not a probe."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            tracer = self._tracer
            is_traced = scope["type"] == ScopeType.HTTP and scope["path"] not in UNTRACED
            if tracer is None or not is_traced:
                await app(scope, receive, send)
            else:
                await self._trace(tracer, app, cast("HTTPScope", scope), receive, send)

        return traced

    async def _trace(
        self, tracer: Tracer, app: ASGIApp, scope: HTTPScope, receive: Receive, send: Send
    ) -> None:
        parent = W3C.extract(_text_headers(scope))
        span = tracer.start_span(
            f"{scope['method']} {_route(scope) or ''}".rstrip(),
            parent,
            SpanKind.SERVER,
            _http_attributes(scope),
        )
        context = otel_context.set_value(OWNER, self, set_span_in_context(span, parent))
        answer: dict[str, str] = {}
        W3C.inject(answer, context)

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                _set_status(span, message["status"])
                added = [(name.encode(), value.encode()) for name, value in answer.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        token = otel_context.attach(context)
        try:
            await app(scope, receive, labelled)
        except BaseException as error:
            _set_error(span, error)
            raise
        finally:
            otel_context.detach(token)
            span.end()

    def observe(self, prompt: Any) -> None:
        """Make the span of a ``FinishedPrompt``, below that of its HTTP request."""
        if self._tracer is not None and otel_context.get_value(OWNER) is self:
            record_prompt(self._tracer, prompt, self._server.model)


async def _close(provider: TracerProvider, exporter: SpanExporter) -> None:
    """Shut ``provider`` down in a thread that ends with the process, whatever the collector does."""
    closed, loop = asyncio.Event(), asyncio.get_running_loop()

    def close() -> None:
        provider.shutdown()
        with suppress(RuntimeError):  # the loop is closed: the collector took too long
            loop.call_soon_threadsafe(closed.set)

    thread = threading.Thread(target=close, name="treadle-opentelemetry-close", daemon=True)
    thread.start()
    for seconds in (CLOSE_SECONDS, GIVE_UP_SECONDS):
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await closed.wait()
                thread.join()  # that was its last line
                return
        exporter.shutdown()  # or it would repeat the export


def _text_headers(scope: HTTPScope) -> dict[str, list[str]]:
    """Return the headers of trace context; one that is repeated is invalid and starts a new trace."""
    headers: dict[str, list[str]] = {}
    for name, value in cast("Any", scope)["headers"]:
        if name in (b"traceparent", b"tracestate"):
            headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
    return {} if len(headers.get("traceparent", ())) > 1 else headers


def _route(scope: HTTPScope) -> str | None:
    return cast("dict[str, Any]", scope).get("path_template")


def _http_attributes(scope: HTTPScope) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if (route := _route(scope)) is not None:
        attributes["http.route"] = route
    if scope["server"] is not None:
        attributes["server.address"] = scope["server"][0]
        if scope["server"][1] is not None:
            attributes["server.port"] = scope["server"][1]
    state: dict[str, Any] = cast("Any", scope).get("state") or {}
    if "request_id" in state:
        attributes["treadle.request_id"] = str(state["request_id"])
    return attributes


def _set_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute("error.type", str(status))
        span.set_status(Status(StatusCode.ERROR))


def _set_error(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR))
