"""The events of a streamed answer, the same for every route that generates.

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
from treadle_server.request_metrics import TokenUsageCounter
from treadle_server.sse import EventBuffer, EventWriter
from treadle_server.wire.common import Usage

__all__ = (
    "AnswerWriter",
    "ChoiceStream",
    "ChoicesWriter",
    "EventBuffer",
    "Prepare",
    "answer_events",
    "visible_usage",
)

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


class AnswerWriter(EventWriter):
    """Writes one answer from its outputs into ``buffer``."""

    def begin(self, generation: Generation) -> None:
        """Take the request once it is checked and encoded."""

    def write(self, number: int, output: RequestOutput, counter: TokenUsageCounter) -> None:
        """Write what is new in an output of prompt ``number``, which ``counter`` has counted."""
        raise NotImplementedError

    def finish(self, usage: Usage) -> None:
        """Write what comes after the last output."""


class ChoicesWriter(AnswerWriter):
    """Writes the choices of a completion as chunks, in the order in which they come."""

    def __init__(self, context: ServerContext, choice_type: type[ChoiceStream]) -> None:
        super().__init__()
        self._context, self._choice_type = context, choice_type
        self._choices: dict[int, ChoiceStream] = {}
        self._generation: Generation

    def begin(self, generation: Generation) -> None:
        self._generation = generation

    def write(self, number: int, output: RequestOutput, counter: TokenUsageCounter) -> None:
        generation = self._generation
        usage = counter.usage if generation.request.wants_running_usage else None
        for completion in output.outputs:
            index = number * generation.params.n + completion.index
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choice_type(self._context, generation, index, self.buffer)
                choice.chunk.usage = usage
                choice.open(output, is_first=not self._choices)
                self._choices[index] = choice
            choice.chunk.usage = usage
            choice.write(completion)

    def finish(self, usage: Usage) -> None:
        if self._generation.request.wants_usage:
            last = self._choice_type.new_chunk(self._context, self._generation, [])
            last.usage = usage
            self.buffer.add(last)


async def answer_events(
    context: ServerContext, prepare: Prepare, writer: AnswerWriter
) -> AsyncGenerator[bytes, None]:
    """Yield whole events, without the end. Raises what ``prepare`` and the engine raise."""
    with context.timer() as timer:
        generation = await prepare()
        timer.begin(generation)
        context.request_log.begin(generation)
        writer.begin(generation)
        counter = TokenUsageCounter(timer)
        async with aclosing(merged_outputs(context, generation)) as batches:
            async for batch in batches:
                timer.record_output()
                for number, output in batch:
                    counter.add(number, output)
                    writer.write(number, output, counter)
                yield writer.buffer.take()
        usage = visible_usage(generation, counter.usage)
        writer.finish(usage)
        yield writer.buffer.take()
        timer.record_finished(usage)


def visible_usage(generation: Generation, usage: Usage) -> Usage:
    """Return ``usage`` without the token that the client did not ask for."""
    if not generation.discard_output:
        return usage
    return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
