"""Server-sent events, from pieces of bytes that end anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from treadle.errors import EngineError

__all__ = ("Choice", "Delta", "Event", "EventReader", "Fault", "Function", "ToolCallPiece", "Usage")

MAX_EVENT_BYTES = 16 * 2**20


class Function(msgspec.Struct):
    """The function of a call, or a piece of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallPiece(msgspec.Struct):
    """A piece of a tool call; those of one ``index`` belong together."""

    index: int = 0
    id: str | None = None
    function: Function | None = None


class Delta(msgspec.Struct):
    """What is new. Servers call reasoning ``reasoning_content`` or ``reasoning``."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPiece] | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """A choice of a chat (``delta``) or of a completion (``text``)."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """What the server counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Fault(msgspec.Struct):
    """An error in the middle of a stream."""

    message: str = ""


class Event(msgspec.Struct):
    """One event of a stream of chat or text completions."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Fault | str | None = None

    @property
    def failure(self) -> str | None:
        """The message of the error that ended the stream."""
        if self.error is None:
            return None
        return self.error if isinstance(self.error, str) else self.error.message


DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class EventReader:
    """Splits the body of one response into events. ``is_done`` after ``[DONE]``."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that are complete now. Raises ``EngineError`` if one is not JSON."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EngineError(f"the server sent a line of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            # An event is one line with the data and an empty one; other fields and comments are
            # of no use here, and no server splits JSON over several lines.
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                self.is_done = True
            elif content:
                yield decode(content)


def decode(content: bytes) -> Event:
    try:
        return DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown: Any = content[:80]
        raise EngineError(
            f"the server sent an event that is not OpenAI's: {error}: {shown!r}"
        ) from error
