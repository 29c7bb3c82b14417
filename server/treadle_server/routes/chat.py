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
from treadle_server.routes.generate import run, stream
from treadle_server.wire.chat import ChatCompletion, ChatRequest

__all__ = ("handlers",)


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    @post(
        "/v1/chat/completions",
        dto=request_body(ChatRequest, strict=context.config.strict_requests),
        status_code=200,
        responses=ERROR_RESPONSES,
        summary="Answer a conversation",
        description="With `stream`, the answer is a stream of server-sent events, each of which "
        "holds a chunk, and the last of which is `[DONE]`.",
    )
    async def chat_completions(
        data: Annotated[ChatRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[ChatCompletion]:
        prepare = partial(prepare_chat, context, data, context.client_of(request))
        if data.stream:
            return stream(context, request, prepare, ChoicesWriter(context, ChatChoiceStream))
        generation, (output,), usage = await run(context, request, prepare)
        failed = {label for completion in output.outputs for label in completion.parser_errors}
        headers = {"x-treadle-parser-error": ",".join(sorted(failed))} if failed else {}
        return answer(request, chat_completion(context, generation, output, usage), headers)

    return [chat_completions]
