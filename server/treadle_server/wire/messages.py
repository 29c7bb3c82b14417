"""Chat messages: a union that is told apart by ``role``, and content parts by ``type``."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = (
    "AssistantMessage",
    "Content",
    "DeveloperMessage",
    "FunctionMessage",
    "MediaPart",
    "Message",
    "MessageToolCall",
    "Part",
    "RefusalPart",
    "SystemMessage",
    "TextPart",
    "ToolMessage",
    "UserMessage",
)


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    refusal: str


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


class MessageToolCall(msgspec.Struct, kw_only=True):
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class SystemMessage(msgspec.Struct, tag_field="role", tag="system", kw_only=True):
    content: Content
    name: str | None = None


class DeveloperMessage(msgspec.Struct, tag_field="role", tag="developer", kw_only=True):
    content: Content
    name: str | None = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user", kw_only=True):
    content: Content
    name: str | None = None


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant", kw_only=True):
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


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
