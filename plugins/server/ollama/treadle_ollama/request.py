"""What clients of Ollama send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from treadle_server.surfaces import ChatTool

__all__ = (
    "GenerateRequest",
    "OllamaChatRequest",
    "OllamaMessage",
    "OllamaRequest",
    "ShowRequest",
)

Format = str | dict[str, Any] | None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What chats and completions share."""

    model: Annotated[
        str | None,
        Meta(description="A name that the server serves, with or without :latest."),
    ] = None
    stream: Annotated[
        bool | None, Meta(description="false answers with one object; a stream is the default.")
    ] = None
    format: Annotated[
        Format, Meta(description="json, or the JSON schema that the answer must match.")
    ] = None
    options: Annotated[
        dict[str, Any] | None, Meta(description="How to sample, under Ollama's names.")
    ] = None
    think: Annotated[
        bool | str | None, Meta(description="Whether to think, or how much: low, medium, high.")
    ] = None
    logprobs: Annotated[
        bool | None, Meta(description="Add log probabilities of the output tokens.")
    ] = None
    top_logprobs: Annotated[
        int | None,
        Meta(description="Number of alternatives for each output token; needs logprobs."),
    ] = None
    keep_alive: Annotated[
        str | float | None, Meta(description="Accepted and not used: the model stays loaded.")
    ] = None
    truncate: Annotated[
        bool | None, Meta(description="Accepted; a prompt that is too long is an error.")
    ] = None
    shift: Annotated[
        bool | None, Meta(description="Accepted; an output that fills the context ends.")
    ] = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(description="The function that was called.")]
    arguments: Annotated[
        dict[str, Any] | str | None, Meta(description="The arguments of the call.")
    ] = None
    index: Annotated[int | None, Meta(description="Accepted and not used.")] = None


class OllamaToolCall(msgspec.Struct, kw_only=True):
    function: Annotated[OllamaFunction, Meta(description="The call.")]
    id: Annotated[str | None, Meta(description="What the result of the call names.")] = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: Annotated[
        Literal["system", "user", "assistant", "tool"], Meta(description="Whose message it is.")
    ]
    content: Annotated[str | None, Meta(description="The text of the message.")] = None
    thinking: Annotated[str | None, Meta(description="What the model thought before.")] = None
    images: Annotated[
        list[Any] | None, Meta(description="Refused: models here read text only.")
    ] = None
    tool_calls: Annotated[
        list[OllamaToolCall] | None, Meta(description="The functions that the model called.")
    ] = None
    tool_name: Annotated[str | None, Meta(description="The tool that a result is of.")] = None
    tool_call_id: Annotated[str | None, Meta(description="The call that a result is of.")] = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[
        list[OllamaMessage] | None,
        Meta(description="The conversation; without any, the answer says that the model is there."),
    ] = None
    tools: Annotated[
        list[ChatTool] | None, Meta(description="Functions that the model may call.")
    ] = None


class GenerateRequest(OllamaRequest, kw_only=True):
    prompt: Annotated[
        str | None,
        Meta(description="The prompt; without one, the answer says that the model is there."),
    ] = None
    suffix: Annotated[
        str | None, Meta(description="Write what stands between the prompt and this text.")
    ] = None
    system: Annotated[str | None, Meta(description="The system message.")] = None
    raw: Annotated[bool | None, Meta(description="Continue the prompt without a template.")] = None
    template: Annotated[str | None, Meta(description="Refused: templates are the operator's.")] = (
        None
    )
    context: Annotated[
        list[int] | None, Meta(description="Refused: send the conversation to /api/chat.")
    ] = None
    images: Annotated[
        list[Any] | None, Meta(description="Refused: models here read text only.")
    ] = None


class ShowRequest(msgspec.Struct, kw_only=True):
    model: Annotated[str | None, Meta(description="A name that the server serves.")] = None
    name: Annotated[str | None, Meta(description="Older name of model.")] = None
    verbose: Annotated[bool | None, Meta(description="Accepted and not used.")] = None
