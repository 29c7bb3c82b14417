"""The contract of output parsers: tool calls and reasoning, streamed or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.api.guided import GrammarSpec

__all__ = (
    "Delta",
    "ReasoningDelta",
    "ReasoningParser",
    "StreamParser",
    "TextDelta",
    "Tool",
    "ToolCallDelta",
    "ToolParser",
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call ``index``: ``name`` comes once, with the first piece; the ``arguments`` of
    all pieces concatenate to one JSON object."""

    index: int
    name: str | None
    arguments: str


Delta = TextDelta | ReasoningDelta | ToolCallDelta


class StreamParser(Protocol):
    """Splits one response. One object per response; any chunking gives the same result."""

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        """Take the next piece of output and return what can be said about it by now."""

    def finish(self) -> list[Delta]:
        """The output has ended: return what was held back."""


class ToolParser(StreamParser, Protocol):
    def grammar(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        """The constraint for a ``tool_choice``: ``"required"`` or a named function."""


class ReasoningParser(StreamParser, Protocol):
    @property
    def open(self) -> bool:
        """Whether the output is inside its reasoning; a grammar waits until it is not."""
