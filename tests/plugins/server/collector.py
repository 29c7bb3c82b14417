"""An OpenTelemetry collector: a tiny HTTP server that keeps the spans that it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span:
    """A span as it arrived, with its resource."""

    def __init__(self, span: Any, resource: Any) -> None:
        self.name: str = span.name
        self.trace_id: str = span.trace_id.hex()
        self.id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        self.events: list[str] = [event.name for event in span.events]
        self.is_error = span.status.code == 2
        self.attributes = {item.key: _value(item.value) for item in span.attributes}
        self.resource = {item.key: _value(item.value) for item in resource.attributes}


def _value(value: Any) -> Any:
    field = value.WhichOneof("value")
    if field == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, field)


class Collector:
    """``answer`` is called for each export and returns the status; it may block."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.url = ""
        self.answer: Callable[[], int] = lambda: 200

    def named(self, *names: str) -> list[Span]:
        """Return the one span of each name."""
        found = []
        for name in names:
            (span,) = (span for span in self.spans if span.name == name)
            found.append(span)
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = collector.answer()
            if status == 200:
                export = ExportTraceServiceRequest.FromString(body)
                collector.spans += [
                    Span(span, part.resource)
                    for part in export.resource_spans
                    for scope in part.scope_spans
                    for span in scope.spans
                ]
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
