"""An OpenAI-compatible server that streams what a test says, and pauses where the test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ("FakeServer", "fake_server")


class FakeServer:
    """``answers`` are the streams of the next requests, the last one repeated.

    A stream is a list of deltas (``{"content": "a"}``), raw lines (``str``), and events that are waited
    for. ``status`` other than 200 answers with ``answers`` as the body.
    """

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.answers: list[Any] = [[{"content": "Hello."}]]
        self.models = ["tiny", "other"]
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.chunked = True
        self.left = threading.Event()
        """A client has gone before the end of its answer."""
        self.release = threading.Event()
        """Lets every stream that waits go on, at the end of the test."""

    def next_answer(self) -> Any:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeServer

    def do_GET(self) -> None:
        self.fake.keys.append(self.headers["authorization"])
        models = {
            "object": "list",
            "data": [{"id": m, "object": "model"} for m in self.fake.models],
        }
        self.whole(200, models)

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        self.fake.bodies.append(json.loads(self.rfile.read(size)))
        self.fake.keys.append(self.headers["authorization"])
        answer = self.fake.next_answer()
        if self.fake.status != 200:
            return self.whole(self.fake.status, answer)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if self.fake.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        try:
            self.stream(answer)
        except OSError:
            self.fake.left.set()
            self.close_connection = True

    def stream(self, answer: Sequence[Any]) -> None:
        is_text = self.path.endswith("/v1/completions")
        for item in answer:
            if isinstance(item, threading.Event):
                while not (item.wait(0.02) or self.fake.release.is_set()):
                    self.write(": waiting\n\n")  # fails once the client has left
            elif isinstance(item, str):
                self.write(item)
            else:
                choice = {"index": 0, "finish_reason": item.pop("finish_reason", None)}
                choice |= {"text": item.get("content", "")} if is_text else {"delta": item}
                self.write(f"data: {json.dumps({'choices': [choice]})}\n\n")
        if not any(isinstance(item, str) and "[DONE]" in item for item in answer):
            num_tokens = sum(isinstance(item, dict) for item in answer)
            usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
            self.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
            self.write("data: [DONE]\n\n")
        if self.fake.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def write(self, text: str) -> None:
        data = text.encode()
        if self.fake.chunked:
            data = b"%x\r\n%s\r\n" % (len(data), data)
        self.wfile.write(data)

    def whole(self, status: int, content: Any) -> None:
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Serve on a free port until the block ends."""
    fake = FakeServer()
    handler = type("BoundHandler", (Handler,), {"fake": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            fake.release.set()
            server.shutdown()
            thread.join()
