"""The events of a streamed answer, the same for chats and text completions.

All chunks of one step of the engine leave in one write.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from treadle.outputs import CompletionOutput, RequestOutput
from treadle_server.context import ServerContext
from treadle_server.generation import Generation, merged_outputs
from treadle_server.request_metrics import RequestTimer, TokenUsageCounter
from treadle_server.sse import EventBuffer
from treadle_server.wire.common import Usage

__all__ = ("ChoiceStream", "EventBuffer", "Prepare", "completion_events", "visible_usage")

Prepare = Callable[[], Awaitable[Generation]]
"""Checks a request and turns its texts into ids, which may take long."""


class ChoiceStream(Protocol):
    """Writes the chunks of one choice into a buffer; made with ``(context, generation, index,
    buffer)``. ``chunk`` is sent again and again, with ``usage`` if the client asked for it."""

    chunk: Any

    def __init__(
        self, context: ServerContext, generation: Generation, index: int, buffer: EventBuffer
    ) -> None: ...

    @staticmethod
    def new_chunk(context: ServerContext, generation: Generation, choices: list[Any]) -> Any:
        """Return a chunk with ``choices``; one without any carries the usage."""

    def open(self, output: RequestOutput, *, is_first: bool) -> None:
        """Write what comes before the output, ``is_first`` before all choices of the response."""

    def write(self, completion: CompletionOutput) -> None:
        """Write what is new."""


async def completion_events(
    context: ServerContext, prepare: Prepare, choice_type: type[ChoiceStream]
) -> AsyncGenerator[bytes, None]:
    """Yield whole events, without the last ``[DONE]``. Raises what ``prepare`` and the engine
    raise."""
    timer = RequestTimer(context.metrics if context.config.enable_request_metrics else None)
    generation = await prepare()
    request, n = generation.request, generation.params.n
    buffer, counter = EventBuffer(), TokenUsageCounter()
    choices: dict[int, ChoiceStream] = {}
    async with aclosing(merged_outputs(context.engine, generation)) as batches:
        async for batch in batches:
            timer.record_output()
            for number, output in batch:
                counter.add(number, output)
                usage = counter.usage if request.wants_running_usage else None
                for completion in output.outputs:
                    index = number * n + completion.index
                    choice = choices.get(index)
                    if choice is None:
                        choice = choice_type(context, generation, index, buffer)
                        choice.chunk.usage = usage
                        choice.open(output, is_first=not choices)
                        choices[index] = choice
                    choice.chunk.usage = usage
                    choice.write(completion)
            yield buffer.take()
    usage = visible_usage(generation, counter.usage)
    if request.wants_usage:
        last = choice_type.new_chunk(context, generation, [])
        last.usage = usage
        buffer.add(last)
        yield buffer.take()
    timer.record_finished(usage)


def visible_usage(generation: Generation, usage: Usage) -> Usage:
    """Return ``usage`` without the token that the client did not ask for."""
    if not generation.discard_output:
        return usage
    return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
