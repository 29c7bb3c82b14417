"""The answers of the Messages API."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = (
    "AnswerBlock",
    "AnthropicMessage",
    "AnthropicUsage",
    "TextAnswer",
    "ThinkingAnswer",
    "TokenCount",
    "ToolUseAnswer",
)


class TextAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """``input_tokens`` are those that the prefix cache did not have."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int
