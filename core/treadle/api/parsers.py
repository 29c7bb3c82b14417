"""The contract of output parsers: tool calls and reasoning, streamed or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from treadle.api.structured_output import GrammarSpec

__all__ = (
    "CallIds",
    "Delta",
    "Opens",
    "ReasoningDelta",
    "ReasoningParser",
    "RunsInline",
    "StreamParser",
    "Tagged",
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


@runtime_checkable
class Tagged(Protocol):
    """An optional ability of a parser: it names the texts that its format is written with.

    Where the tokenizer has them as special tokens, they would be left out of the text like all
    others; those that a parser names are kept for it.
    """

    @property
    def tags(self) -> Sequence[str]: ...


@runtime_checkable
class Opens(Protocol):
    """An optional ability of a ``ReasoningParser``, for models that open the reasoning themselves.

    Where the text is one token, an answer that must match a grammar may begin with it, and the
    grammar then waits like for reasoning that the prompt has opened.
    """

    @property
    def opener(self) -> str | None:
        """The text, until the output has begun; ``None`` if it can open nothing."""


@runtime_checkable
class CallIds(Protocol):
    """An optional ability of a ``ToolParser``, for formats that prescribe how ids of calls look."""

    def call_id(self) -> str:
        """An id that no other call has."""


class RunsInline(Protocol):
    """An optional declaration of a parser's class, a plain ``bool`` named ``inline``.

    ``True``: its methods always return within microseconds, and a server calls them on its event
    loop. ``False``: a server calls them in a thread that it can abandon. Without it, parsers of
    treadle's own distributions run inline and all others in the thread.
    """

    inline: bool
