"""Run a generation for a handler: until it is finished, or as a stream."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response

from treadle.outputs import RequestOutput
from treadle_server.active_requests import ActiveRequest
from treadle_server.completion_stream import (
    ChoiceStream,
    Prepare,
    completion_events,
    visible_usage,
)
from treadle_server.context import ServerContext
from treadle_server.generation import Generation, whole_outputs
from treadle_server.request_metrics import RequestTimer, usage_of
from treadle_server.sse import EventStream

__all__ = ("run", "stream")


async def run(
    context: ServerContext, request: Request[Any, Any, Any], prepare: Prepare
) -> tuple[Generation, list[RequestOutput]]:
    """Return what ``prepare`` returns and its finished outputs, one for each prompt.

    Ends with the client, the deadline or the server. Raises what ``prepare`` and the engine raise.
    """
    timer = RequestTimer(context.metrics if context.config.enable_request_metrics else None)

    async def work(_: ActiveRequest) -> tuple[Generation, list[RequestOutput]]:
        generation = await prepare()
        return generation, await whole_outputs(context.engine, generation)

    generation, outputs = await context.active_requests.run(request.receive, work)
    timer.record_finished(visible_usage(generation, usage_of(outputs)), outputs)
    return generation, outputs


def stream(
    context: ServerContext,
    request: Request[Any, Any, Any],
    prepare: Prepare,
    choice_type: type[ChoiceStream],
) -> Response[Any]:
    """Return the streamed answer to what ``prepare`` returns."""
    ignored = request.state.get("ignored_fields")
    return EventStream(
        completion_events(context, prepare, choice_type),
        context.active_requests,
        context.config.sse_keep_alive_interval,
        {"x-ignored-fields": ignored} if ignored else None,
    )
