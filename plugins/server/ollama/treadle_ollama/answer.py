"""What clients of Ollama get: the objects of an answer, which are the lines of a stream, too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from treadle_server.surfaces import ChatTokenLogprob

__all__ = (
    "AnswerFunction",
    "AnswerMessage",
    "AnswerToolCall",
    "ChatAnswer",
    "GenerateAnswer",
    "OllamaAnswer",
    "timestamp",
)


Count = Annotated[int | None, Meta(description="A number of tokens; the last object has it.")]
Duration = Annotated[int | None, Meta(description="Nanoseconds; the last object has it.")]
Thinking = Annotated[str | None, Meta(description="What the model thought, if it was to think.")]


class AnswerFunction(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="The number of the call in the answer.")]
    name: Annotated[str, Meta(description="The function to call.")]
    arguments: Annotated[dict[str, Any], Meta(description="The arguments of the call.")]


class AnswerToolCall(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="What the result of the call names.")]
    function: AnswerFunction


class AnswerMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Annotated[str, Meta(description="Always assistant.")]
    content: Annotated[str, Meta(description="The text of the answer, or a piece of it.")]
    thinking: Thinking = None
    tool_calls: Annotated[
        list[AnswerToolCall] | None, Meta(description="The functions that the model calls.")
    ] = None


class OllamaAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Durations are nanoseconds. Only the last object of an answer has them, and the counts."""

    model: Annotated[str, Meta(description="The name that the request has.")]
    created_at: Annotated[str, Meta(description="When the object was made, as RFC 3339 says.")]
    done: Annotated[bool, Meta(description="Whether this is the last object of the answer.")]
    done_reason: Annotated[
        str | None, Meta(description="stop, length, or load for a request without a prompt.")
    ] = None
    logprobs: Annotated[
        list[ChatTokenLogprob] | None, Meta(description="Log probabilities of the tokens.")
    ] = None
    total_duration: Duration = None
    load_duration: Duration = None
    prompt_eval_count: Count = None
    prompt_eval_duration: Duration = None
    eval_count: Count = None
    eval_duration: Duration = None


class GenerateAnswer(OllamaAnswer, kw_only=True):
    response: Annotated[str, Meta(description="The text of the answer, or a piece of it.")]
    thinking: Thinking = None


class ChatAnswer(OllamaAnswer, kw_only=True):
    message: AnswerMessage


def timestamp(seconds: float | None = None) -> str:
    """Return a time in the form of RFC 3339; now, if it is ``None``."""
    time = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")
