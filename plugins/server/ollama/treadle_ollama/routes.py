"""``POST /api/chat`` and ``POST /api/generate``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec
from litestar.params import Body

from treadle_ollama.answer import ChatAnswer, GenerateAnswer
from treadle_ollama.errors import RESPONSES_TEXT, OllamaError
from treadle_ollama.request import GenerateRequest, OllamaChatRequest
from treadle_ollama.translate import Call, chat_call, generate_call
from treadle_ollama.writer import OllamaWriter, loaded
from treadle_server.surfaces import (
    ChatRequest,
    Generation,
    ServerContext,
    answer,
    ignore_fields,
    prepare_chat,
    prepare_completion,
    request_body,
    stream,
    until_disconnect,
    write_all,
)

__all__ = ("RESPONSES", "handlers")

RESPONSES = {
    status: ResponseSpec(OllamaError, description=text, generate_examples=False)
    for status, text in RESPONSES_TEXT.items()
}
STREAM = "Unless `stream` is false, the answer is a stream of lines, each of which is an object."


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    strict = context.config.strict_requests

    @post(
        "/api/chat",
        dto=request_body(OllamaChatRequest, strict=strict),
        status_code=200,
        opt={"other_media_type": "application/x-ndjson"},
        responses=RESPONSES,
        summary="Answer a conversation, in the form of Ollama",
        description=STREAM,
    )
    async def chat(
        data: Annotated[OllamaChatRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[ChatAnswer]:
        call = chat_call(context, data)
        return await answered(context, request, call, data.stream, is_chat=True)

    @post(
        "/api/generate",
        dto=request_body(GenerateRequest, strict=strict),
        status_code=200,
        opt={"other_media_type": "application/x-ndjson"},
        responses=RESPONSES,
        summary="Answer or continue a prompt, in the form of Ollama",
        description=STREAM,
    )
    async def generate(
        data: Annotated[GenerateRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[GenerateAnswer]:
        call = generate_call(context, data)
        return await answered(context, request, call, data.stream, is_chat=False)

    return [chat, generate]


async def answered(
    context: ServerContext,
    request: Request[Any, Any, Any],
    call: Call,
    streams: bool | None,
    *,
    is_chat: bool,
) -> Response[Any]:
    ignore_fields(request, call.ignored)
    if call.request is None:
        context.check_alive()
        return answer(request, loaded(call, is_chat=is_chat))
    writer = OllamaWriter(context, call, is_chat=is_chat)
    prepare = partial(prepared, context, call, context.client_of(request))
    if streams is not False:
        return stream(context, request, prepare, writer)
    await until_disconnect(context, request, partial(write_all, context, prepare, writer))
    failed = ",".join(sorted(writer.parser_errors))
    return answer(request, writer.answer, {"x-treadle-parser-error": failed} if failed else None)


async def prepared(context: ServerContext, call: Call, client: str) -> Generation:
    if isinstance(call.request, ChatRequest):
        return await prepare_chat(context, call.request, client)
    if call.request is None:
        raise RuntimeError("a request without a prompt is not run")
    return await prepare_completion(context, call.request, client)
