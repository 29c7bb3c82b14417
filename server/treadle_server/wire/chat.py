"""``POST /v1/chat/completions``. The messages are in ``wire.messages``, the tools in ``wire.tools``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from treadle_server.wire.common import SamplingFields, Usage, WireLogprob
from treadle_server.wire.messages import Message
from treadle_server.wire.tools import (
    ChatTool,
    FunctionSpec,
    NamedFunction,
    ReasoningOptions,
    ThinkingOptions,
    ToolChoice,
)

__all__ = (
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatRequest",
    "ChatTokenLogprob",
    "CustomToolCall",
    "ToolCallChunk",
    "ToolCallFunction",
    "TopLogprob",
)


class ChatRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[Message], Meta(description="The conversation.")]
    max_completion_tokens: Annotated[
        int | None, Meta(description="Most tokens of an output; counts more than max_tokens.")
    ] = None
    logprobs: Annotated[
        bool | None, Meta(description="Add log probabilities of the output tokens.")
    ] = None
    top_logprobs: Annotated[
        int | None,
        Meta(description="Number of alternatives for each output token; needs logprobs."),
    ] = None
    tools: Annotated[
        list[ChatTool] | None, Meta(description="Functions that the model may call.")
    ] = None
    tool_choice: Annotated[
        str | ToolChoice | None,
        Meta(description="none, auto, required (or any), a named tool, or allowed_tools."),
    ] = None
    functions: Annotated[
        list[FunctionSpec] | None, Meta(description="Older form of tools; not with tools.")
    ] = None
    function_call: Annotated[
        str | NamedFunction | None, Meta(description="Older form of tool_choice.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="false keeps the first call of an answer.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="End the prompt with the beginning of an assistant turn.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Continue the last message, which is the assistant's.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Arguments of the chat template.")
    ] = None
    documents: Annotated[
        list[dict[str, Any]] | None, Meta(description="Documents for the chat template.")
    ] = None
    include_reasoning: Annotated[
        bool | None, Meta(description="false leaves the reasoning out of the answer.")
    ] = None
    separate_reasoning: Annotated[
        bool | None, Meta(description="false leaves the reasoning in the content.")
    ] = None
    reasoning_effort: Annotated[
        str | None,
        Meta(description="The template argument of this name; none turns thinking off, others on."),
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None, Meta(description="effort, and whether to think and to show it.")
    ] = None
    thinking: Annotated[
        ThinkingOptions | None, Meta(description="Whether to think: enabled, disabled, adaptive.")
    ] = None


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ToolCallFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str


class CustomToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | None = None
    input: str


class ToolCallChunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call, or a piece of one: pieces have an ``index``, only the first has ``id`` and ``type``."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: ToolCallFunction | None = None
    custom: CustomToolCall | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None
    function_call: ToolCallFunction | None = None


class ChatChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, WireLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new. ``reasoning`` and ``reasoning_content`` are two names of one thing."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None
    function_call: ToolCallFunction | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, WireLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
