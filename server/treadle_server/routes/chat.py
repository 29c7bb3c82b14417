"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler

from treadle_server.chat.answer import answer
from treadle_server.chat.prepare import Chat, prepare
from treadle_server.chat.stream import events
from treadle_server.context import Context
from treadle_server.decode import Reader
from treadle_server.flights import Flight
from treadle_server.outputs import final
from treadle_server.pace import Pace
from treadle_server.routes.answers import json_answer, read
from treadle_server.sse import EventStream
from treadle_server.wire.chat import ChatCompletion, ChatRequest

__all__ = ("handlers",)


def handlers(context: Context) -> list[HTTPRouteHandler]:
    reader = Reader(ChatRequest, strict=context.config.strict_requests)

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(request: Request[Any, Any, Any]) -> Response[Any]:
        wanted, headers = await read(request, reader)
        chat = await prepare(context, wanted)
        if wanted.stream:
            return EventStream(
                events(context, chat), context.flights, context.config.stream_keep_alive, headers
            )

        async def work(_: Flight) -> tuple[ChatCompletion, list[str]]:
            return await whole(context, chat)

        content, failed = await context.flights.run(request.receive, work)
        if failed:
            headers["x-treadle-parser-error"] = ",".join(sorted(set(failed)))
        return json_answer(content, headers=headers)

    return [chat_completions]


async def whole(context: Context, chat: Chat) -> tuple[ChatCompletion, list[str]]:
    pace = Pace(context.metrics if context.config.enable_request_metrics else None)
    prompt = {"prompt_token_ids": chat.ids}
    output = await final(context.engine, prompt, chat.params, chat.id)
    found = await answer(context, chat, output)
    pace.end(found[0].usage, [output])
    return found
