"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: the request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from treadle_server.wire.common import SamplingFields
from treadle_server.wire.tools import ThinkingOptions

__all__ = (
    "AnthropicTool",
    "AnthropicToolChoice",
    "ContentBlock",
    "MessageParam",
    "MessagesRequest",
)


class TextSource(msgspec.Struct, kw_only=True):
    """Where a document comes from; only a text can be served."""

    type: str
    data: str | None = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """A block of a message, of the system prompt or of a result. What it has depends on ``type``."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    source: TextSource | str | None = None
    title: str | None = None
    cache_control: Any = None


class MessageParam(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool of the client. Those of a type other than ``custom`` are left out."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[MessageParam], Meta(description="The conversation.")]
    system: Annotated[str | list[ContentBlock] | None, Meta(description="The system prompt.")] = (
        None
    )
    stop_sequences: Annotated[list[str] | None, Meta(description="Texts that end the output.")] = (
        None
    )
    tools: Annotated[
        list[AnthropicTool] | None, Meta(description="Tools that the model may call.")
    ] = None
    tool_choice: Annotated[
        AnthropicToolChoice | None, Meta(description="auto, any, tool or none.")
    ] = None
    thinking: Annotated[
        ThinkingOptions | None,
        Meta(description="enabled or adaptive lets the model think and shows it; off without."),
    ] = None
    output_config: Annotated[
        OutputConfig | None, Meta(description="effort, and the format of the output.")
    ] = None
    output_format: Annotated[
        OutputFormat | None, Meta(description="Older name of output_config.format.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Arguments of the chat template.")
    ] = None
    metadata: Annotated[Any, Meta(description="Accepted and not used.")] = None
    context_management: Annotated[Any, Meta(description="Accepted and not used.")] = None
    service_tier: Annotated[str | None, Meta(description="Accepted and not used.")] = None
