"""Convert typed messages and tools to the arguments of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.errors import RequestError
from treadle.text.chat import Conversation
from treadle_server.decode import check_depth
from treadle_server.errors import APIError
from treadle_server.wire.chat import ChatRequest, ChatTool
from treadle_server.wire.messages import (
    AssistantMessage,
    Content,
    MediaPart,
    Message,
    RefusalPart,
    TextPart,
    ToolMessage,
)
from treadle_server.wire.tokenize import TokenizeRequest

__all__ = ("MAX_MESSAGES", "MAX_TOOLS", "MAX_TOOL_BYTES", "to_conversation")

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 * 2**10

# Arguments of the renderer itself: a client's template arguments must not take their place.
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "chat_template", "return_tensors", "return_dict", "self", "conversation"}
)


def to_conversation(
    request: ChatRequest | TokenizeRequest, *, knows_developer: bool, client: str
) -> Conversation:
    """Return what the renderer and the parsers need for ``client``. Raises ``RequestError``.

    Templates that do not know the role ``developer`` get ``system``, which means the same.
    """
    messages = to_messages(request.messages or [], knows_developer=knows_developer)
    continues = bool(request.continue_final_message)
    if continues and messages[-1]["role"] != "assistant":
        raise RequestError(
            f"continue_final_message needs a last message of the assistant, not "
            f"{messages[-1]['role']}",
            param="continue_final_message",
        )
    generates = request.add_generation_prompt
    conversation = Conversation(
        messages=messages,
        tools=to_tools(request.tools),
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        chat_template_kwargs=template_arguments(request),
        client=client,
    )
    if not isinstance(request, ChatRequest):
        return conversation
    choice = request.tool_choice
    return msgspec.structs.replace(
        conversation,
        tool_choice=choice if isinstance(choice, str | None) else msgspec.to_builtins(choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        separate_reasoning=request.separate_reasoning is not False,
        structured_output_backend=request.guided_decoding_backend,
    )


def to_messages(messages: Sequence[Message], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Return plain dicts. Raises ``RequestError`` for what cannot be served."""
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed",
            param="messages",
        )
    return [to_message(m, f"messages[{i}]", knows_developer) for i, m in enumerate(messages)]


def to_message(message: Message, path: str, knows_developer: bool) -> dict[str, Any]:
    role = str(message.__struct_config__.tag)
    if role == "developer" and not knows_developer:
        role = "system"
    fields: dict[str, Any] = {"role": role, "content": content(message.content, f"{path}.content")}
    if message.name is not None:
        fields["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        fields.update(assistant_fields(message, path))
    return fields


def content(value: Content | None, path: str) -> str | list[dict[str, str]]:
    """Return text as text and parts as parts: the renderer adapts them to the template."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = []
    for i, part in enumerate(value):
        match part:
            case TextPart():
                parts.append({"type": "text", "text": part.text})
            case RefusalPart():
                parts.append({"type": "text", "text": part.refusal})
            case MediaPart():
                raise RequestError(
                    f"{path}[{i}] is of type {part.__struct_config__.tag}; this model is served "
                    "for text only: send parts of type text",
                    param=f"{path}[{i}].type",
                )
    return parts


def assistant_fields(message: AssistantMessage, path: str) -> dict[str, Any]:
    """Return the fields that only an assistant's message has."""
    fields: dict[str, Any] = {}
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    if message.tool_calls:
        if len(message.tool_calls) > MAX_TOOLS:
            raise RequestError(
                f"{path}.tool_calls has {len(message.tool_calls)} entries; at most {MAX_TOOLS}",
                param=f"{path}.tool_calls",
            )
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type or "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.content is None and message.refusal:
        fields["content"] = message.refusal
    return fields


def arguments(value: str | dict[str, Any] | None) -> Any:
    """Return the arguments of a call as an object, which templates expect; other text is unchanged."""
    if isinstance(value, str):
        try:
            check_depth(value.encode())
            decoded = msgspec.json.decode(value)
        except (APIError, msgspec.DecodeError, UnicodeError):
            return value
        return decoded if isinstance(decoded, dict) else value
    return value or {}


def to_tools(tools: Sequence[ChatTool] | None) -> list[dict[str, Any]] | None:
    """Return the tools in the form of a template, or ``None``. Raises ``RequestError`` beyond the bounds."""
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS}", param="tools")
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOL_BYTES:
        raise RequestError(
            f"tools take {size} bytes of JSON; at most {MAX_TOOL_BYTES} are allowed", param="tools"
        )
    for i, tool in enumerate(tools):
        name = tool.function.name
        if not (0 < len(name) <= 128 and name.isprintable()):
            raise RequestError(
                f"tools[{i}].function.name must be 1 to 128 printable characters",
                param=f"tools[{i}].function.name",
            )
    return [{"type": "function", "function": msgspec.to_builtins(t.function)} for t in tools]


def template_arguments(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return what the template gets beside messages and tools. Raises ``RequestError`` for an
    argument that would shadow one of the renderer's own."""
    arguments: dict[str, Any] = {}
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        arguments["reasoning_effort"] = request.reasoning_effort
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in RESERVED or name.startswith("_") or not name.isidentifier():
            raise RequestError(
                f"chat_template_kwargs holds {name[:64]!r}, which is not the client's to set; "
                "use the request field of that name if there is one",
                param="chat_template_kwargs",
            )
        arguments[name] = value
    if isinstance(request, ChatRequest) and request.documents is not None:
        arguments["documents"] = request.documents
    return arguments
