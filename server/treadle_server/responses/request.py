"""``POST /v1/responses``: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from treadle_server.wire.common import SamplingFields
from treadle_server.wire.tools import CustomToolFormat, ReasoningOptions

__all__ = ("InputContent", "InputItem", "ResponseTool", "ResponsesRequest", "TextFormat")


class InputContent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a message, of a tool's output or of a thought. What it has depends on ``type``."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One item of the input: a message unless ``type`` says otherwise. What it has depends on ``type``."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputContent] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputContent] | None = None
    summary: list[InputContent] | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """A ``function`` or ``custom`` tool, or a ``namespace`` of them. Hosted tools are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomToolFormat | None = None
    tools: list[ResponseTool] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class AllowedNames(msgspec.Struct, kw_only=True):
    type: str = "function"
    name: str | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """A named tool, or with type ``allowed_tools`` those that may be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedNames] | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    CHAT_FIELDS: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "structured_outputs": "text.format",
    }
    """What the fields of a chat, which errors name, are called here."""

    input: Annotated[
        str | list[InputItem] | None, Meta(description="A text, or the items of a conversation.")
    ] = None
    instructions: Annotated[
        str | None, Meta(description="The system message; not kept for the next response.")
    ] = None
    previous_response_id: Annotated[
        str | None, Meta(description="Continue the conversation of a response that is kept.")
    ] = None
    store: Annotated[bool | None, Meta(description="false does not keep the response.")] = None
    max_output_tokens: Annotated[
        int | None, Meta(description="Most tokens of the output, reasoning included.")
    ] = None
    tools: Annotated[
        list[ResponseTool] | None, Meta(description="Tools that the model may call.")
    ] = None
    tool_choice: Annotated[
        str | ResponseToolChoice | None,
        Meta(description="none, auto, required, a named tool, or allowed_tools."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="false keeps the first call of an answer.")
    ] = None
    reasoning: Annotated[
        ReasoningOptions | None, Meta(description="effort: none turns thinking off, others on.")
    ] = None
    text: Annotated[
        TextOptions | None, Meta(description="format: text, json_object or json_schema.")
    ] = None
    include: Annotated[
        list[str] | None,
        Meta(
            description="message.output_text.logprobs adds log probabilities; others say nothing here."
        ),
    ] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Number of alternatives for each token of the text.")
    ] = None
    metadata: Annotated[
        dict[str, str] | None, Meta(description="Up to 16 texts that the response repeats.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Arguments of the chat template.")
    ] = None
    background: Annotated[
        bool | None, Meta(description="true is refused: a response ends with its connection.")
    ] = None
    conversation: Annotated[
        Any, Meta(description="Refused: send previous_response_id, or all items.")
    ] = None
    prompt: Annotated[Any, Meta(description="Refused: prompts are not kept here.")] = None
    truncation: Annotated[str | None, Meta(description="disabled; auto is refused.")] = None
