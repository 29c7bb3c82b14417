"""From a request of Ollama's clients to a chat or a completion, which is all that the server runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.errors import RequestError
from treadle_ollama.options import to_sampling
from treadle_ollama.request import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaRequest,
)
from treadle_server.surfaces import (
    AssistantMessage,
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    JSONSchema,
    Message,
    MessageToolCall,
    ResponseFormat,
    ServerContext,
    SystemMessage,
    ThinkingOptions,
    ToolMessage,
    UserMessage,
)

__all__ = ("Call", "chat_call", "generate_call", "served_name")

LATEST = ":latest"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the server runs it. Without one, the client only wants the model to be loaded."""

    request: ChatRequest | CompletionRequest | None
    model: str
    hides_thinking: bool = False
    num_top_logprobs: int | None = None
    ignored: list[str] = []


def served_name(context: ServerContext, name: str | None) -> str:
    """Return the served name that a client means. Raises ``ModelNotFoundError``."""
    if name and name not in context.names and name.removesuffix(LATEST) in context.names:
        return name.removesuffix(LATEST)
    context.check_model(name)
    return name or context.model


def chat_call(context: ServerContext, request: OllamaChatRequest) -> Call:
    """Check and translate a chat. Raises ``RequestError``."""
    fields, call = begin(context, request)
    if not request.messages:
        return call
    messages = to_messages(request.messages)
    tools = request.tools or None
    if tools and context.chat_processor.parser_plugins.tool_call_parser is None:
        raise RequestError(
            f"{call.model} does not support tools: the server was started without "
            "--tool-call-parser",
            param="tools",
        )
    chat = ChatRequest(
        **fields,
        **chat_fields(context, request, call.model),
        messages=messages,
        tools=tools,
        continue_final_message=is_beginning(messages[-1]),
    )
    return msgspec.structs.replace(call, request=chat)


def generate_call(context: ServerContext, request: GenerateRequest) -> Call:
    """Check and translate a completion. Raises ``RequestError``."""
    if request.template:
        raise RequestError(
            "template is not accepted: templates are the operator's; send raw: true with a prompt "
            "that is complete",
            param="template",
        )
    if request.context:
        raise RequestError(
            "context is not accepted: send the conversation to /api/chat", param="context"
        )
    refuse_images(request.images, "images")
    fields, call = begin(context, request)
    if not request.prompt and not request.suffix:
        return call
    prompt = request.prompt or ""
    if request.raw or request.suffix:
        for name in ("system", "think"):
            if getattr(request, name):
                raise RequestError(
                    f"{name} needs the template of a chat; leave out raw and suffix, or {name}",
                    param=name,
                )
        fields.setdefault("max_tokens", -1)
        completion = CompletionRequest(
            **fields, prompt=prompt, suffix=request.suffix or None, logprobs=call.num_top_logprobs
        )
        return msgspec.structs.replace(call, request=completion)
    messages: list[Message] = [SystemMessage(content=request.system)] if request.system else []
    chat = ChatRequest(
        **fields,
        **chat_fields(context, request, call.model),
        messages=[*messages, UserMessage(content=prompt)],
    )
    return msgspec.structs.replace(call, request=chat)


def begin(context: ServerContext, request: OllamaRequest) -> tuple[dict[str, Any], Call]:
    """Return the fields that a chat and a completion share, and a call without a request."""
    model = served_name(context, request.model)
    fields, ignored = to_sampling(request.options, strict=context.config.strict_requests)
    if (form := to_response_format(request.format)) is not None:
        fields["response_format"] = form
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    call = Call(
        request=None,
        model=request.model or model,
        hides_thinking=request.think is False,
        num_top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        ignored=ignored,
    )
    return {**fields, "model": model, "stream": True}, call


def chat_fields(context: ServerContext, request: OllamaRequest, model: str) -> dict[str, Any]:
    """Return how a chat thinks, and the log probabilities of its answer."""
    fields: dict[str, Any] = {}
    think = request.think
    if think and context.chat_processor.parser_plugins.reasoning_parser is None:
        raise RequestError(
            f"{model} does not support thinking: the server was started without --reasoning-parser",
            param="think",
        )
    if isinstance(think, str):
        fields["reasoning_effort"] = think
    elif think is not None:
        fields["thinking"] = ThinkingOptions(type="enabled" if think else "disabled")
    if request.logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return fields


def to_response_format(format: str | dict[str, Any] | None) -> ResponseFormat | None:
    if format is None or format == "":
        return None
    if format == "json":
        return ResponseFormat(type="json_object")
    if isinstance(format, str):
        raise RequestError(
            f'format is {format[:64]!r}; it must be "json" or a JSON schema', param="format"
        )
    return ResponseFormat(type="json_schema", json_schema=JSONSchema(schema=format))


def to_messages(messages: Sequence[OllamaMessage]) -> list[Message]:
    """Raises ``RequestError`` for images."""
    chat: list[Message] = []
    for i, message in enumerate(messages):
        refuse_images(message.images, f"messages[{i}].images")
        content = message.content or ""
        match message.role:
            case "system":
                chat.append(SystemMessage(content=content))
            case "user":
                chat.append(UserMessage(content=content))
            case "tool":
                chat.append(
                    ToolMessage(
                        content=content, tool_call_id=message.tool_call_id, name=message.tool_name
                    )
                )
            case "assistant":
                chat.append(assistant_message(message, content))
    return chat


def assistant_message(message: OllamaMessage, content: str) -> AssistantMessage:
    calls = [
        MessageToolCall(
            id=call.id,
            function=CalledFunction(
                name=call.function.name, arguments=call.function.arguments or {}
            ),
        )
        for call in message.tool_calls or ()
    ]
    return AssistantMessage(
        content=content or None, reasoning=message.thinking or None, tool_calls=calls or None
    )


def is_beginning(last: Message) -> bool:
    """Whether the last message is the beginning of the answer, which the model continues."""
    return isinstance(last, AssistantMessage) and bool(last.content) and not last.tool_calls


def refuse_images(images: Sequence[Any] | None, path: str) -> None:
    if images:
        raise RequestError(
            f"{path} holds {len(images)} images, but this model reads text only; leave them out",
            param=path,
        )
