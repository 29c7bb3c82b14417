"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import Body

from treadle_server.chat.answer import ChatChoiceStream, chat_completion
from treadle_server.chat.prepare import prepare_chat
from treadle_server.completion_stream import ChoicesWriter
from treadle_server.context import ServerContext
from treadle_server.decode import request_body
from treadle_server.openapi import ERROR_RESPONSES
from treadle_server.routes.answers import answer
from treadle_server.routes.generate import complete, stream, until_disconnect
from treadle_server.wire.chat import ChatCompletion, ChatRequest

__all__ = ("complete_chat", "handlers")


async def complete_chat(
    context: ServerContext, data: ChatRequest, client: str
) -> tuple[ChatCompletion, str]:
    """Return the whole answer to a request of ``client``, and the parsers that failed on it.

    Raises what ``prepare_chat`` and the engine raise.
    """
    generation, (output,), usage = await complete(
        context, partial(prepare_chat, context, data, client)
    )
    failed = {label for completion in output.outputs for label in completion.parser_errors}
    return chat_completion(context, generation, output, usage), ",".join(sorted(failed))


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    @post(
        "/v1/chat/completions",
        dto=request_body(ChatRequest, strict=context.config.strict_requests),
        status_code=200,
        opt={"other_media_type": "text/event-stream"},
        responses=ERROR_RESPONSES,
        summary="Answer a conversation",
        description="With `stream`, the answer is a stream of server-sent events, each of which "
        "holds a chunk, and the last of which is `[DONE]`.",
    )
    async def chat_completions(
        data: Annotated[ChatRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[ChatCompletion]:
        client = context.client_of(request)
        if data.stream:
            prepare = partial(prepare_chat, context, data, client)
            return stream(context, request, prepare, ChoicesWriter(context, ChatChoiceStream))
        work = partial(complete_chat, context, data, client)
        completion, failed = await until_disconnect(context, request, work)
        return answer(request, completion, {"x-treadle-parser-error": failed} if failed else None)

    return [chat_completions]
