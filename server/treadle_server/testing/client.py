"""Asking an ASGI application inside of the process: nothing is bound, no port is taken."""

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
            found = self.json["error"]
            complete = {"message", "type", "param", "code"} <= found.keys()
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError):
            return None
        return found if complete and isinstance(found["message"], str) else None


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
    """One request, of JSON if it has a body. ``received`` is called for each part of the answer.

    Raises ``TimeoutError`` after ``seconds``, and what ``app`` raises.
    """
    answer, asked = Answer(), False
    sent = {"host": "localhost", "content-length": str(len(body)), **(headers or {})}
    if body:
        sent.setdefault("content-type", "application/json")
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
        "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 80),
    }

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:  # the client stays until it has its answer
            await asyncio.Event().wait()
        asked = True
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
