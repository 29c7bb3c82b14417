"""``POST /v1/responses``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Request, post
from litestar import Response as HTTPResponse
from litestar.handlers import HTTPRouteHandler
from litestar.params import Body

from treadle_server.chat.prepare import prepare_chat
from treadle_server.context import ServerContext
from treadle_server.decode import request_body
from treadle_server.openapi import ERROR_RESPONSES
from treadle_server.responses.answer import Response
from treadle_server.responses.prepare import ResponseCall, to_chat
from treadle_server.responses.request import ResponsesRequest
from treadle_server.responses.store import StoredResponse
from treadle_server.responses.stored import stored_handlers
from treadle_server.responses.writer import ResponseWriter
from treadle_server.routes.answers import answer, ignore_fields
from treadle_server.routes.generate import stream, write_all

__all__ = ("handlers",)


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    @post(
        "/v1/responses",
        dto=request_body(ResponsesRequest, strict=context.config.strict_requests),
        status_code=200,
        responses=ERROR_RESPONSES,
        summary="Answer a conversation, and keep the answer for the next one",
        description="With `stream`, the answer is a stream of the events of the Responses API, the "
        "last of which is `response.completed`, `response.incomplete` or `response.failed`.",
    )
    async def create_response(
        data: Annotated[ResponsesRequest, Body()], request: Request[Any, Any, Any]
    ) -> HTTPResponse[Response]:
        owner = context.owner_of(request)
        call = to_chat(data, context.responses, owner)
        ignore_fields(request, call.ignored)
        writer = ResponseWriter(context, call, partial(keep, context, call, owner))
        client, id = context.client_of(request), writer.response.id
        prepare = partial(prepare_chat, context, call.chat, client, id=id)
        if data.stream:
            return stream(context, request, prepare, writer)
        await write_all(context, request, prepare, writer)
        failed = ",".join(sorted(set(writer.parser_errors)))
        return answer(
            request, writer.response, {"x-treadle-parser-error": failed} if failed else None
        )

    return [create_response, *stored_handlers(context)]


def keep(context: ServerContext, call: ResponseCall, owner: str, response: Response) -> bool:
    """Store a finished response; returns whether it is kept."""
    entry = StoredResponse(
        id=response.id,
        response=msgspec.json.encode(response),
        items=msgspec.json.encode(call.items),
        item_ids=frozenset(item.id for item in response.output),
    )
    return context.responses.put(owner, entry)
