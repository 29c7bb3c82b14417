"""The answers of the Responses API: the response, its items, and what lists and deletes say."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from treadle_server.wire.chat import ChatTokenLogprob

__all__ = (
    "CallItem",
    "CustomCallItem",
    "DeletedResponse",
    "InputItems",
    "InputTokensDetails",
    "MessageItem",
    "OutputItem",
    "OutputText",
    "OutputTokensDetails",
    "ReasoningItem",
    "ReasoningText",
    "Response",
    "ResponseError",
    "ResponseUsage",
)

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | None = None


class CallItem(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="function_call"
):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="custom_tool_call"
):
    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | None = None


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class Response(msgspec.Struct, kw_only=True):
    """A response, whole or while it is made. The fields of the request are as the client sent them."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class InputItems(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True
