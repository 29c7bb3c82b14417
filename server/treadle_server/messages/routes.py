"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec
from litestar.params import Body

from treadle.errors import ContextLengthError
from treadle_server.chat.conversation import to_conversation
from treadle_server.chat.prepare import prepare_chat, rendered
from treadle_server.context import ServerContext
from treadle_server.decode import request_body
from treadle_server.errors import APIError
from treadle_server.generation import Generation
from treadle_server.messages.answer import AnthropicMessage, TokenCount
from treadle_server.messages.errors import AnthropicErrorBody
from treadle_server.messages.prepare import MessageCall, to_chat
from treadle_server.messages.request import MessagesRequest
from treadle_server.messages.writer import MessageWriter
from treadle_server.openapi import ERRORS
from treadle_server.routes.answers import answer, ignore_fields
from treadle_server.routes.generate import stream, until_disconnect, write_all
from treadle_server.routes.tokenize import check_size

__all__ = ("handlers",)

CHARS_PER_TOKEN = 4
"""For the number of tokens in the refusal of a prompt that is too long to be encoded."""
RESPONSES = {
    status: ResponseSpec(AnthropicErrorBody, description=text, generate_examples=False)
    for status, text in ERRORS.items()
}


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    body = request_body(MessagesRequest, strict=context.config.strict_requests)

    @post(
        "/v1/messages",
        dto=body,
        status_code=200,
        opt={"other_media_type": "text/event-stream"},
        responses=RESPONSES,
        summary="Answer a conversation, in the form of the Anthropic API",
        description="With `stream`, the answer is a stream of the events of the Messages API, the "
        "last of which is `message_stop`.",
    )
    async def create_message(
        data: Annotated[MessagesRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[AnthropicMessage]:
        call = to_chat(data)
        ignore_fields(request, call.ignored)
        id = f"msg_{context.new_id('')[1:]}"
        writer = MessageWriter(context, call, id, request.state.get("request_id") or "")
        prepare = partial(prepare_message, context, call, context.client_of(request), id)
        if data.stream:
            return stream(context, request, prepare, writer)
        await until_disconnect(context, request, partial(write_all, context, prepare, writer))
        failed = ",".join(sorted(set(writer.parser_errors)))
        return answer(
            request, writer.message, {"x-treadle-parser-error": failed} if failed else None
        )

    @post(
        "/v1/messages/count_tokens",
        dto=body,
        status_code=200,
        responses=RESPONSES,
        summary="Count the tokens of a conversation without answering it",
    )
    async def count_message_tokens(
        data: Annotated[MessagesRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[TokenCount]:
        call = to_chat(data)
        ignore_fields(request, call.ignored)
        client = context.client_of(request)
        count = await until_disconnect(context, request, partial(num_tokens, context, call, client))
        return answer(request, TokenCount(input_tokens=count))

    return [create_message, count_message_tokens]


async def prepare_message(
    context: ServerContext, call: MessageCall, client: str, id: str
) -> Generation:
    """``prepare_chat``, with a prompt that is too long refused in the words that clients know."""
    limit = context.engine.info.max_model_len
    try:
        generation = await prepare_chat(context, call.chat, client, id=id)
    except ContextLengthError as error:
        chat = to_conversation(call.chat, knows_developer=context.knows_developer, client=client)
        num_tokens = max(limit + 1, chat.num_chars // CHARS_PER_TOKEN)
        raise too_long(num_tokens, limit) from error
    num_tokens = len(generation.prompts[0].ids or ())
    if num_tokens >= limit and generation.params.truncate_prompt_tokens is None:
        raise too_long(num_tokens, limit - 1)
    return generation


def too_long(num_tokens: int, limit: int) -> APIError:
    return APIError(
        400,
        f"prompt is too long: {num_tokens} tokens > {limit} maximum",
        code="context_length_exceeded",
    )


async def num_tokens(context: ServerContext, call: MessageCall, client: str) -> int:
    """Return the length of the prompt that a message would have. Raises ``RequestError``."""
    context.check_model(call.request.model)
    chat = to_conversation(call.chat, knows_developer=context.knows_developer, client=client)
    check_size(context, chat.num_chars, "messages")
    prompt = await rendered(
        chat,
        lambda c: context.chat_processor.render(c, tools=c.tool_choice != "none"),
    )
    return len(prompt.ids or ())
