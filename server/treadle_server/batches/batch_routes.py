"""``/v1/batches``: create, describe, list and cancel batches."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import Body

from treadle_server.batches.files import disk_error
from treadle_server.batches.pages import BatchQuery, page_of, query_of
from treadle_server.batches.service import check_endpoint
from treadle_server.batches.wire import Batch, BatchList, BatchRequest
from treadle_server.context import ServerContext
from treadle_server.decode import request_body
from treadle_server.openapi import CONFLICT, ERROR_RESPONSES
from treadle_server.responses.prepare import check_metadata

__all__ = ("handlers",)


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    def id_of(request: Request[Any, Any, Any]) -> str:
        return str(request.path_params["batch_id"])

    @post(
        "/v1/batches",
        dto=request_body(BatchRequest, strict=context.config.strict_requests),
        status_code=200,
        responses=ERROR_RESPONSES,
        summary="Run the requests of a file",
    )
    async def create_batch(
        data: Annotated[BatchRequest, Body()], request: Request[Any, Any, Any]
    ) -> Batch:
        service = context.need_batches()
        check_endpoint(data.endpoint)
        check_metadata(data.metadata)
        try:
            return service.create(context.owner_of(request), data)
        except OSError as error:
            raise disk_error(error, "the batch could not be written") from error

    @get(
        "/v1/batches",
        responses=ERROR_RESPONSES,
        summary="List the batches of this key, the newest first",
        description="The query has `limit` (1 to 100) and `after` (the id of a batch).",
    )
    async def list_batches(request: Request[Any, Any, Any]) -> BatchList:
        query = query_of(request, BatchQuery)
        records = context.need_batches().records.of(context.owner_of(request))
        batches = [record.batch for record in reversed(records)]
        return page_of(BatchList, batches, query.limit, query.after)

    @get("/v1/batches/{batch_id:str}", responses=ERROR_RESPONSES, summary="Describe a batch")
    async def retrieve_batch(request: Request[Any, Any, Any]) -> Batch:
        records = context.need_batches().records
        return records.get(context.owner_of(request), id_of(request)).batch

    @post(
        "/v1/batches/{batch_id:str}/cancel",
        status_code=200,
        responses={**ERROR_RESPONSES, **CONFLICT},
        summary="Stop a batch, which keeps the answers that it has",
    )
    async def cancel_batch(request: Request[Any, Any, Any]) -> Batch:
        return context.need_batches().cancel(context.owner_of(request), id_of(request))

    return [create_batch, list_batches, retrieve_batch, cancel_batch]
