"""``/v1/responses/{id}``: retrieve, cancel and delete responses that are kept, and list their input."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from litestar import Request, delete, get, post
from litestar import Response as HTTPResponse
from litestar.handlers import HTTPRouteHandler

from treadle.errors import RequestError
from treadle_server.context import ServerContext
from treadle_server.errors import APIError
from treadle_server.openapi import ERROR_RESPONSES
from treadle_server.responses.answer import DeletedResponse, InputItems, Response
from treadle_server.responses.prepare import missing_response
from treadle_server.responses.store import StoredResponse

__all__ = ("stored_handlers",)

MAX_LIMIT = 100


class Page(msgspec.Struct, frozen=True):
    """Which items a list has, from the query of its URL."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def stored_handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    def stored(request: Request[Any, Any, Any]) -> StoredResponse:
        id = str(request.path_params["id"])
        entry = context.responses.get(context.owner_of(request), id)
        if entry is None:
            raise missing_response(id)
        return entry

    @get(
        "/v1/responses/{id:str}",
        responses=ERROR_RESPONSES,
        summary="Return a response that is kept",
    )
    async def retrieve_response(request: Request[Any, Any, Any]) -> HTTPResponse[Response]:
        entry = stored(request)
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise RequestError(
                "stream is not offered here: a response streams while it is made", param="stream"
            )
        return HTTPResponse(msgspec.Raw(entry.response), media_type="application/json")  # type: ignore[arg-type]

    @delete(
        "/v1/responses/{id:str}",
        status_code=200,
        responses=ERROR_RESPONSES,
        summary="Forget a response",
    )
    async def delete_response(request: Request[Any, Any, Any]) -> DeletedResponse:
        id = stored(request).id
        context.responses.delete(context.owner_of(request), id)
        return DeletedResponse(id=id)

    @post(
        "/v1/responses/{id:str}/cancel",
        status_code=200,
        responses=ERROR_RESPONSES,
        summary="Refuse: only background responses can be cancelled, and there are none",
    )
    async def cancel_response(request: Request[Any, Any, Any]) -> HTTPResponse[Response]:
        raise APIError(
            400,
            f"the response {stored(request).id!r} is complete; only a response with background: true, "
            "which is not offered, can be cancelled: close the connection to end one that runs",
            param="id",
        )

    @get(
        "/v1/responses/{id:str}/input_items",
        responses=ERROR_RESPONSES,
        summary="List the items that a response answers",
        description="Those of the responses that it continues are among them. The query has `limit` "
        "(1 to 100), `order` (`asc`, `desc`) and `after` (the id of an item).",
    )
    async def input_items(request: Request[Any, Any, Any]) -> InputItems:
        page, items = page_of(request), stored_items(stored(request))
        if page.order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if page.after is not None:
            if page.after not in ids:
                raise RequestError(f"after is {page.after[:80]!r}, which is no item", param="after")
            items = items[ids.index(page.after) + 1 :]
        data = items[: page.limit]
        return InputItems(
            data=data,
            first_id=data[0]["id"] if data else None,
            last_id=data[-1]["id"] if data else None,
            has_more=len(items) > page.limit,
        )

    return [retrieve_response, delete_response, cancel_response, input_items]


def stored_items(entry: StoredResponse) -> list[dict[str, Any]]:
    return msgspec.json.decode(entry.items, type=list[dict[str, Any]])


def page_of(request: Request[Any, Any, Any]) -> Page:
    """Raises ``RequestError`` that names a wrong parameter."""
    try:
        return msgspec.convert(dict(request.query_params), Page, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise RequestError(f"{name}: {message}", param=name or None) from None
