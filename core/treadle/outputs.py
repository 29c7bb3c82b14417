"""The outputs of a request."""

from __future__ import annotations

import msgspec

__all__ = (
    "CompletionOutput",
    "Logprob",
    "OutputPart",
    "ReasoningPart",
    "RequestMetrics",
    "RequestOutput",
    "TextPart",
    "ToolCall",
)


class Logprob(msgspec.Struct, frozen=True):
    """Log probability of a token at one position. ``rank`` is 1 for the most probable token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Text of the answer itself."""

    text: str


class ReasoningPart(msgspec.Struct, frozen=True, tag="reasoning"):
    """What the model wrote before its answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, tag="tool_call"):
    """A call of the function ``name`` with ``arguments``, the text of a JSON object.

    In a delta it is one piece of call ``index``: only the first piece has ``id`` and ``name``, and
    the ``arguments`` of all pieces concatenate.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


OutputPart = TextPart | ReasoningPart | ToolCall


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the ``n`` outputs of a request.

    ``finish_reason`` is ``stop``, ``length``, ``tool_calls``, ``abort`` or ``error``; ``None`` if not
    finished. ``stop_reason`` is the matched stop string or stop token id; ``None`` if the EOS token or
    something else ended the output. ``text`` is all that the model wrote; ``content``,
    ``reasoning`` and ``tool_calls`` are what the parsers of a chat found in it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """If ``finish_reason`` is ``error``: a message that may be shown to the client."""
    error_param: str | None = None
    """The parameter that caused it, if one did: a grammar that came to a dead end."""

    parts: list[OutputPart] | None = None
    """The text as parsers have split it, in order; ``None`` if no parser read it."""
    parser_errors: list[str] = []
    """The parsers that failed on this output, as ``tool_call_parser=name``; in a delta, since the last.
    What they had not delivered is text."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def content(self) -> str:
        """The answer itself: ``text`` without reasoning and tool calls."""
        if self.parts is None:
            return self.text
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str | None:
        """What the model wrote before its answer, ``None`` if nothing."""
        texts = [part.text for part in self.parts or () if isinstance(part, ReasoningPart)]
        return "".join(texts) if texts else None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that the model made; in a delta, pieces of calls."""
        return [part for part in self.parts or () if isinstance(part, ToolCall)]


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of a request, in seconds of a monotonic clock."""

    arrival_time: float = 0.0
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request and its outputs so far.

    If ``output_kind`` is ``"delta"``, texts, ids and logprobs contain only what is new since the
    previous output. ``num_cached_tokens`` counts the prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    unenforced: str | None = None
    """What of the constraint that was asked for the output need not obey."""
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)
