"""From a request of the Messages API to a chat request, which is all that the server runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.errors import RequestError
from treadle_server.messages.content import to_messages
from treadle_server.messages.request import (
    AnthropicTool,
    AnthropicToolChoice,
    MessagesRequest,
)
from treadle_server.wire.chat import ChatRequest
from treadle_server.wire.common import JSONSchema, ResponseFormat, SamplingFields
from treadle_server.wire.messages import AssistantMessage
from treadle_server.wire.tools import ChatTool, FunctionSpec, ThinkingOptions, ToolChoice

__all__ = ("MessageCall", "to_chat")


class MessageCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a chat, with what its answer needs to know."""

    request: MessagesRequest
    chat: ChatRequest
    shows_thinking: bool
    ignored: list[str]


def to_chat(request: MessagesRequest) -> MessageCall:
    """Check and translate a request. Raises ``RequestError``.

    Clients that did not ask for thinking read the first block as the answer: for them the model
    is told not to think, and what it thinks nevertheless is left out.
    """
    if (request.n or 1) != 1:
        raise RequestError(f"n is {request.n}; a message is one output", param="n")
    tools, dropped = to_tools(request.tools or ())
    messages = to_messages(request)
    last = messages[-1] if messages else None
    continues = isinstance(last, AssistantMessage) and not last.tool_calls
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    choice = request.tool_choice
    shared = {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
    shared.update(stream=True, stream_options=None)
    if request.stop_sequences is not None:
        shared["stop"] = request.stop_sequences
    if (form := response_format(request)) is not None:
        shared["response_format"] = form
    chat = ChatRequest(
        **shared,
        messages=messages,
        tools=tools or None,
        tool_choice=to_tool_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        continue_final_message=continues,
        thinking=request.thinking if thinks else ThinkingOptions(type="disabled"),
        chat_template_kwargs=template_arguments(request),
    )
    return MessageCall(
        request=request, chat=chat, shows_thinking=thinks, ignored=list(dict.fromkeys(dropped))
    )


def template_arguments(request: MessagesRequest) -> dict[str, Any] | None:
    """Return the arguments of the template. The effort is no switch here, as it is in a chat:
    clients send it whether or not the model shall think."""
    effort = None if request.output_config is None else request.output_config.effort
    if effort is None:
        return request.chat_template_kwargs
    return {"reasoning_effort": effort[:64], **(request.chat_template_kwargs or {})}


def to_tools(tools: Sequence[AnthropicTool]) -> tuple[list[ChatTool], list[str]]:
    """Return the tools of the client, and the types of those that only another host can run."""
    served, dropped = [], []
    for tool in tools:
        if tool.type not in (None, "custom"):
            dropped.append(f"tools.{tool.type}")
            continue
        function = FunctionSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        served.append(ChatTool(function=function))
    return served, dropped


def to_tool_choice(choice: AnthropicToolChoice | None) -> str | ToolChoice | None:
    match choice:
        case None:
            return None
        case AnthropicToolChoice(type="tool", name=name):
            if not name:
                raise RequestError("tool_choice of type tool needs a name", param="tool_choice")
            return ToolChoice(name=name)
        case AnthropicToolChoice(type="any"):
            return "required"
        case _:
            return choice.type


def response_format(request: MessagesRequest) -> ResponseFormat | None:
    config = request.output_config
    form = request.output_format if config is None or config.format is None else config.format
    if form is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JSONSchema(schema=form.schema))
