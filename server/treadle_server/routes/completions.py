"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler

from treadle_server.completions.answer import answer
from treadle_server.completions.prepare import Job, prepare
from treadle_server.completions.stream import events
from treadle_server.context import Context
from treadle_server.decode import Reader
from treadle_server.flights import Flight
from treadle_server.outputs import finals
from treadle_server.pace import Pace, usage_of
from treadle_server.routes.answers import json_answer, read
from treadle_server.sse import EventStream
from treadle_server.wire.completions import Completion, CompletionRequest

__all__ = ("handlers",)


def handlers(context: Context) -> list[HTTPRouteHandler]:
    reader = Reader(CompletionRequest, strict=context.config.strict_requests)

    @post("/v1/completions", status_code=200)
    async def completions(request: Request[Any, Any, Any]) -> Response[Any]:
        wanted, headers = await read(request, reader)
        job = await prepare(context, wanted)
        if wanted.stream:
            return EventStream(
                events(context, job), context.flights, context.config.stream_keep_alive, headers
            )

        async def work(_: Flight) -> Completion:
            return await whole(context, job)

        return json_answer(await context.flights.run(request.receive, work), headers=headers)

    return [completions]


async def whole(context: Context, job: Job) -> Completion:
    pace = Pace(context.metrics if context.config.enable_request_metrics else None)
    outputs = await finals(context.engine, job.prompts, job.params, job.id)
    found = answer(context, job, outputs)
    pace.end(found.usage or usage_of(outputs), outputs)
    return found
