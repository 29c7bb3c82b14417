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
from treadle_server.completion_stream import Prepare
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
from treadle_server.routes.generate import stream, until_disconnect, write_all

__all__ = ("complete_response", "handlers")


async def complete_response(
    context: ServerContext, data: ResponsesRequest, client: str, owner: str
) -> Response:
    """Return the whole answer to a request of ``client``, kept for ``owner``.

    Raises what ``to_chat``, ``prepare_chat`` and the engine raise.
    """
    call = to_chat(data, context.responses, owner)
    writer, prepare = writer_of(context, call, client, owner)
    await write_all(context, prepare, writer)
    return writer.response


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    @post(
        "/v1/responses",
        dto=request_body(ResponsesRequest, strict=context.config.strict_requests),
        status_code=200,
        opt={"other_media_type": "text/event-stream"},
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
        writer, prepare = writer_of(context, call, context.client_of(request), owner)
        if data.stream:
            return stream(context, request, prepare, writer)
        await until_disconnect(context, request, partial(write_all, context, prepare, writer))
        failed = ",".join(sorted(set(writer.parser_errors)))
        return answer(
            request, writer.response, {"x-treadle-parser-error": failed} if failed else None
        )

    return [create_response, *stored_handlers(context)]


def writer_of(
    context: ServerContext, call: ResponseCall, client: str, owner: str
) -> tuple[ResponseWriter, Prepare]:
    """Return what writes the response to a call, and what prepares its generation."""
    writer = ResponseWriter(context, call, partial(keep, context, call, owner))
    return writer, partial(prepare_chat, context, call.chat, client, id=writer.response.id)


def keep(context: ServerContext, call: ResponseCall, owner: str, response: Response) -> bool:
    """Store a finished response; returns whether it is kept."""
    entry = StoredResponse(
        id=response.id,
        response=msgspec.json.encode(response),
        items=msgspec.json.encode(call.items),
        item_ids=frozenset(item.id for item in response.output),
    )
    return context.responses.put(owner, entry)
