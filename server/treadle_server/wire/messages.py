"""Chat messages: a union that is told apart by ``role``, and content parts by ``type``."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = (
    "AssistantMessage",
    "CalledCustomTool",
    "CalledFunction",
    "Content",
    "DeveloperMessage",
    "FunctionMessage",
    "InputTextPart",
    "MediaPart",
    "Message",
    "MessageToolCall",
    "OutputTextPart",
    "Part",
    "ReasoningPart",
    "RedactedThinkingPart",
    "RefusalPart",
    "SystemMessage",
    "TextPart",
    "ThinkingPart",
    "ToolMessage",
    "UserMessage",
)


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


class InputTextPart(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str


class ThinkingPart(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str | None = None


class RedactedThinkingPart(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    data: str | None = None


class ReasoningPart(msgspec.Struct, tag_field="type", tag="reasoning"):
    text: str | None = None


class MediaPart(msgspec.Struct, tag_field="type", tag="media"):
    """The base class of content parts that are not supported; their content is not read."""


class ImageURLPart(MediaPart, tag="image_url"): ...


class InputImagePart(MediaPart, tag="input_image"): ...


class InputAudioPart(MediaPart, tag="input_audio"): ...


class AudioURLPart(MediaPart, tag="audio_url"): ...


class VideoURLPart(MediaPart, tag="video_url"): ...


class FilePart(MediaPart, tag="file"): ...


Part = (
    TextPart
    | InputTextPart
    | OutputTextPart
    | ThinkingPart
    | RedactedThinkingPart
    | ReasoningPart
    | RefusalPart
    | ImageURLPart
    | InputImagePart
    | InputAudioPart
    | AudioURLPart
    | VideoURLPart
    | FilePart
)
Content = str | list[Part]


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustomTool(msgspec.Struct, kw_only=True):
    name: str
    input: str | None = None


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call of a function, or of a custom tool."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None


class SystemMessage(msgspec.Struct, tag_field="role", tag="system", kw_only=True):
    content: Content | None
    name: str | None = None


class DeveloperMessage(msgspec.Struct, tag_field="role", tag="developer", kw_only=True):
    content: Content | None
    name: str | None = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user", kw_only=True):
    content: Content | None
    name: str | None = None


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant", kw_only=True):
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: CalledFunction | None = None


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool", kw_only=True):
    content: Content | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function", kw_only=True):
    content: Content | None = None
    name: str | None = None


Message = (
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage
)
