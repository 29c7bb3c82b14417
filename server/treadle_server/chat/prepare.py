"""From a chat request to prompt ids and sampling parameters."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from treadle.api.sampling_params import BOUNDS, SamplingParams
from treadle.errors import ContextLengthError, RequestError
from treadle.text.chat import Conversation, PreparedChat
from treadle_server.chat.conversation import merged_turns, to_conversation
from treadle_server.chat.thinking import budget_of
from treadle_server.context import ServerContext
from treadle_server.generation import Generation
from treadle_server.wire.chat import ChatRequest

__all__ = ("prepare_chat", "rendered")

T = TypeVar("T")

UNSET = SamplingParams().max_tokens


async def prepare_chat(
    context: ServerContext, request: ChatRequest, client: str, *, id: str = ""
) -> Generation:
    """Check, render and encode a request of ``client``. Raises ``RequestError`` or ``APIError``."""
    context.check_model(request.model)
    conversation = to_conversation(request, knows_developer=context.knows_developer, client=client)
    check_tool_parser(context, conversation)
    changes: dict[str, Any] = {"max_tokens": max_tokens(request, context.defaults)}
    top_logprobs = num_top_logprobs(request)
    if request.logprobs:
        changes["logprobs"] = top_logprobs
    params = context.to_params(request, client, **changes)
    chat = await rendered(conversation, lambda c: context.chat_processor.prepare(c, params))
    if params.thinking_token_budget is None:
        chat = await with_hint(chat, budget_of(request))
    return Generation(
        id=id or context.new_id("chatcmpl"),
        created_time=int(time.time()),
        request=request,
        prompts=[chat.prompt],
        params=chat.params,
        chat=chat,
    )


async def with_hint(chat: PreparedChat, budget: int | None) -> PreparedChat:
    """Return the chat with a budget that clients send whatever the model is, if it can be kept."""
    if budget is None or budget < 0:
        return chat
    try:
        return await chat.plugins.with_thinking_budget(chat, budget)
    except RequestError:
        return chat


async def rendered(conversation: Conversation, render: Callable[[Conversation], Awaitable[T]]) -> T:
    """Return what ``render`` makes of the conversation; of one with merged turns if the template
    refuses its order."""
    try:
        return await render(conversation)
    except ContextLengthError:
        raise
    except RequestError as error:
        merged = merged_turns(conversation)
        if error.param != "messages" or merged.messages == conversation.messages:
            raise
        try:
            return await render(merged)
        except RequestError:
            raise error from None


def check_tool_parser(context: ServerContext, chat: Conversation) -> None:
    """Raise ``RequestError`` for tools if no parser would find their calls in the output."""
    parser_plugins = context.chat_processor.parser_plugins
    if not chat.tools or chat.tool_choice == "none" or parser_plugins.tool_call_parser is not None:
        return
    parser_names = ", ".join(parser_plugins.plugins.keys("tool_parsers")) or "none installed"
    raise RequestError(
        "this server does not parse tool calls: start it with --tool-call-parser NAME "
        f"(known: {parser_names}), or send tool_choice none",
        param="tool_choice",
    )


def max_tokens(request: ChatRequest, defaults: SamplingParams) -> int | None:
    """Unlike a completion, a chat answer may fill the context unless the model's defaults say so."""
    for requested in (request.max_completion_tokens, request.max_tokens):
        if requested is not None:
            return requested
    return None if defaults.max_tokens == UNSET else defaults.max_tokens


def num_top_logprobs(request: ChatRequest) -> int:
    top = request.top_logprobs
    if top is None:
        return 0
    if not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    low, high = BOUNDS["logprobs"]
    if not low <= top <= high:
        raise RequestError(
            f"top_logprobs is {top}; it must be in [{low}, {high}]", param="top_logprobs"
        )
    return top
