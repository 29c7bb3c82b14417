"""The interface of output parsers, for tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from treadle.api.structured_output import GrammarSpec

__all__ = (
    "Delta",
    "ReasoningDelta",
    "ReasoningParser",
    "StreamParser",
    "SupportsCallIds",
    "SupportsInlineCalls",
    "SupportsReasoningCloser",
    "SupportsReasoningOpener",
    "SupportsSpecialTags",
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
    """A piece of tool call ``index``.

    Only the first piece has a ``name``. The ``arguments`` of all pieces form a JSON object.
    """

    index: int
    name: str | None
    arguments: str


Delta = TextDelta | ReasoningDelta | ToolCallDelta


class StreamParser(Protocol):
    """Parses one response. The result must not depend on how the output is split into pieces."""

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        """Consume the next piece of output and return the deltas that are certain."""

    def finish(self) -> list[Delta]:
        """Return the pending text as deltas. Called at the end of the output."""


class ToolParser(StreamParser, Protocol):
    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        """Return the grammar for a ``tool_choice``: ``"required"`` or a named function."""


class ReasoningParser(StreamParser, Protocol):
    @property
    def in_reasoning(self) -> bool:
        """Whether the output is inside the reasoning. A grammar applies after it."""


@runtime_checkable
class SupportsSpecialTags(Protocol):
    """Optional protocol of a parser: the tags of its format.

    If tags are special tokens, they are kept in the text that the parser receives.
    """

    @property
    def special_tags(self) -> Sequence[str]: ...


@runtime_checkable
class SupportsReasoningOpener(Protocol):
    """Optional protocol of a ``ReasoningParser``, for models that generate the opening tag.

    If the tag is one token, structured output may begin with it, or with its first token where the
    model is ``in_reasoning`` already; the grammar then applies after the reasoning.
    """

    @property
    def opening_tag(self) -> str | None:
        """The opening tag before any output, or ``None`` if reasoning cannot start."""


@runtime_checkable
class SupportsReasoningCloser(Protocol):
    """Optional protocol of a ``ReasoningParser``: how a thought can be ended that takes too long."""

    @property
    def closing_tag(self) -> str: ...


@runtime_checkable
class SupportsCallIds(Protocol):
    """Optional protocol of a ``ToolParser``, for formats that prescribe the form of call ids."""

    def call_id(self) -> str:
        """Return a new unique id."""


class SupportsInlineCalls(Protocol):
    """An optional declaration of a parser's class, a plain ``bool`` named ``inline``.

    ``True``: its methods always return within microseconds, and a server calls them on its event
    loop. ``False``: a server calls them in a thread that it can abandon. Without it, parsers of
    treadle's own distributions run inline and all others in the thread.
    """

    inline: bool
