"""Tools, the choice among them, and how to think: parts of chat requests."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = (
    "AllowedTools",
    "ChatTool",
    "CustomTool",
    "CustomToolFormat",
    "FunctionSpec",
    "NamedFunction",
    "ReasoningOptions",
    "ThinkingOptions",
    "ToolChoice",
    "ToolReference",
)


class FunctionSpec(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomToolGrammar(msgspec.Struct, kw_only=True, omit_defaults=True):
    syntax: str | None = None
    definition: str | None = None


class CustomToolFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``grammar`` nests the grammar in chats; the Responses API has its fields here."""

    type: Literal["text", "grammar"] = "text"
    grammar: CustomToolGrammar | None = None
    syntax: str | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool whose input is free text."""

    name: str
    description: str | None = None
    format: CustomToolFormat | None = None


class ChatTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["function", "custom"] = "function"
    function: FunctionSpec | None = None
    custom: CustomTool | None = None


class NamedFunction(msgspec.Struct):
    name: str


class ToolReference(msgspec.Struct, kw_only=True):
    """The name of a tool, here or in ``function`` or ``custom``."""

    type: str = "function"
    name: str | None = None
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolReference]


class ToolChoice(ToolReference, kw_only=True):
    """A named tool, or the tools that may be called."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How to think, in the form of OpenRouter and the Responses API."""

    effort: str | None = None
    max_tokens: int | None = None
    exclude: bool | None = None
    enabled: bool | None = None
    summary: str | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    """How to think, in the form of the Messages API."""

    type: Literal["enabled", "disabled", "adaptive"] = "enabled"
    budget_tokens: int | None = None
    display: str | None = None
