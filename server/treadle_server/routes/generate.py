"""Run a generation until it is finished, or as a stream.

``complete`` and ``write_all`` know no client: a handler passes them to ``until_disconnect``, a batch
awaits them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from litestar import Request, Response

from treadle.outputs import RequestOutput
from treadle_server.completion_stream import (
    AnswerWriter,
    Prepare,
    answer_events,
    visible_usage,
)
from treadle_server.context import ServerContext
from treadle_server.generation import Generation, whole_outputs
from treadle_server.request_metrics import count_reasoning, usage_of
from treadle_server.sse import EventStream
from treadle_server.wire.common import Usage

__all__ = ("complete", "stream", "until_disconnect", "write_all")

T = TypeVar("T")


async def until_disconnect(
    context: ServerContext,
    request: Request[Any, Any, Any],
    work: Callable[[], Coroutine[Any, Any, T]],
) -> T:
    """Return the result of ``work``, which ends with the client, the deadline or the server."""
    return await context.active_requests.run(request.receive, lambda _: work())


async def complete(
    context: ServerContext, prepare: Prepare
) -> tuple[Generation, list[RequestOutput], Usage]:
    """Return what ``prepare`` returns, its finished outputs, one for each prompt, and their usage.

    Raises what ``prepare`` and the engine raise.
    """
    with context.timer() as timer:
        generation = await prepare()
        timer.begin(generation)
        context.request_log.begin(generation)
        outputs = await whole_outputs(context, generation)
        client = "" if generation.chat is None else generation.chat.conversation.client
        usage = usage_of(outputs, await count_reasoning(context.engine, outputs, client))
        usage = visible_usage(generation, usage)
        timer.record_outputs(outputs)
        timer.record_finished(usage)
    return generation, outputs, usage


def stream(
    context: ServerContext,
    request: Request[Any, Any, Any],
    prepare: Prepare,
    writer: AnswerWriter,
) -> Response[Any]:
    """Return the streamed answer to what ``prepare`` returns."""
    ignored = request.state.get("ignored_fields")
    return EventStream(
        answer_events(context, prepare, writer),
        writer,
        context.active_requests,
        context.config.sse_keep_alive_interval,
        {"x-ignored-fields": ignored} if ignored else None,
    )


async def write_all(context: ServerContext, prepare: Prepare, writer: AnswerWriter) -> None:
    """Let ``writer`` write a whole answer that nobody reads as a stream.

    Raises what ``prepare`` and the engine raise.
    """
    async with aclosing(answer_events(context, prepare, writer)) as events:
        async for _ in events:
            pass
