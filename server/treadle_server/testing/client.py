"""A client that calls an ASGI application in the same process, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

__all__ = ("Answer", "ask")


@dataclass
class Answer:
    """``parts`` are the bytes of the body as they were sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        """Raises ``msgspec.DecodeError``."""
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error of an answer in the form of the OpenAI API; ``None`` if it has another."""
        try:
            error = self.json["error"]
            is_complete = {"message", "type", "param", "code"} <= error.keys()
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
            return None
        return error if is_complete and isinstance(error["message"], str) else None


async def ask(
    app: Any,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    headers: Mapping[str, str] | None = None,
    received: Callable[[], object] = bool,
    seconds: float = 10.0,
) -> Answer:
    """Send one request, of JSON if it has a body. ``received`` is called for each part of the answer.

    Raises ``TimeoutError`` after ``seconds``, and what ``app`` raises.
    """
    answer, is_sent = Answer(), False
    all_headers = {"host": "localhost", "content-length": str(len(body)), **(headers or {})}
    if body:
        all_headers.setdefault("content-type", "application/json")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode()) for k, v in all_headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if is_sent:  # the client stays until it has its answer
            await asyncio.Event().wait()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message.get("headers", ())}
        elif message["type"] == "http.response.body" and message.get("body"):
            answer.parts.append(bytes(message["body"]))
            received()

    async with asyncio.timeout(seconds):
        await app(scope, receive, send)
    return answer
