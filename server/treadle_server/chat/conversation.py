"""Convert typed messages and tools to the arguments of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.errors import RequestError
from treadle.text.chat import Conversation
from treadle_server.chat.thinking import thinking_arguments
from treadle_server.chat.tools import MAX_TOOLS, ToolSelection, select_tools, to_tools
from treadle_server.decode import check_depth
from treadle_server.errors import APIError
from treadle_server.wire.chat import ChatRequest
from treadle_server.wire.messages import (
    AssistantMessage,
    Content,
    FunctionMessage,
    InputTextPart,
    MediaPart,
    Message,
    MessageToolCall,
    OutputTextPart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolMessage,
)
from treadle_server.wire.tokenize import TokenizeRequest

__all__ = ("MAX_MESSAGES", "merged_turns", "to_conversation")

MAX_MESSAGES = 4096

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
    if isinstance(request, ChatRequest):
        selection = select_tools(request)
    else:
        selection = ToolSelection(tools=to_tools(request.tools))
    conversation = Conversation(
        messages=messages,
        tools=selection.tools,
        tool_choice=selection.choice,
        parallel_tool_calls=selection.is_parallel,
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        chat_template_kwargs=template_arguments(request),
        client=client,
    )
    if not isinstance(request, ChatRequest):
        return conversation
    return msgspec.structs.replace(
        conversation,
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
    if isinstance(message, FunctionMessage):  # the older form of a tool's message
        fields["role"], fields["tool_call_id"] = "tool", message.name
    if isinstance(message, AssistantMessage):
        fields.update(assistant_fields(message, path))
    return fields


def content(value: Content | None, path: str) -> str | list[dict[str, str]]:
    """Return text as text and parts as parts: the renderer adapts them to the template.

    Thoughts are no part of the text.
    """
    if value is None or isinstance(value, str):
        return value or ""
    parts = []
    for i, part in enumerate(value):
        match part:
            case TextPart() | InputTextPart() | OutputTextPart():
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
    if (reasoning := reasoning_of(message)) is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    calls = message.tool_calls or []
    if message.function_call is not None and not calls:
        called = message.function_call
        calls = [MessageToolCall(id=called.name, function=called)]
    if len(calls) > MAX_TOOLS:
        raise RequestError(
            f"{path}.tool_calls has {len(calls)} entries; at most {MAX_TOOLS}",
            param=f"{path}.tool_calls",
        )
    if calls:
        fields["tool_calls"] = [
            to_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if message.content is None and message.refusal:
        fields["content"] = message.refusal
    return fields


def reasoning_of(message: AssistantMessage) -> str | None:
    """Return what the assistant thought, from whichever field has it."""
    for text in (message.reasoning, message.reasoning_content):
        if text is not None:
            return text
    parts = message.content if isinstance(message.content, list) else ()
    thoughts = [p.thinking for p in parts if isinstance(p, ThinkingPart) and p.thinking]
    return "\n".join(thoughts) or None


def to_call(call: MessageToolCall, path: str) -> dict[str, Any]:
    if call.function is not None:
        name, values = call.function.name, arguments(call.function.arguments)
    elif call.custom is not None:
        name, values = call.custom.name, {"input": call.custom.input or ""}
    else:
        raise RequestError(f"{path} has neither function nor custom", param=path)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": values}}


def merged_turns(conversation: Conversation) -> Conversation:
    """Return the conversation with one system message, at its beginning, and no two user messages
    in a row, for templates that refuse other orders."""
    system: list[str] = []
    messages: list[dict[str, Any]] = []
    for message in conversation.messages:
        fields = dict(message)
        if fields["role"] in ("system", "developer"):
            system.append(text_of(fields["content"]))
        elif messages and fields["role"] == messages[-1]["role"] == "user":
            texts = (messages[-1]["content"], fields["content"])
            messages[-1]["content"] = "\n\n".join(map(text_of, texts))
        else:
            messages.append(fields)
    if system:
        messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return msgspec.structs.replace(conversation, messages=messages)


def text_of(value: str | Sequence[dict[str, str]]) -> str:
    return value if isinstance(value, str) else "\n".join(part["text"] for part in value)


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


def template_arguments(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return what the template gets beside messages and tools. Raises ``RequestError`` for an
    argument that would shadow one of the renderer's own."""
    arguments: dict[str, Any] = {}
    if isinstance(request, ChatRequest):
        arguments.update(thinking_arguments(request))
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
