"""Running prompts on the engine: all to the end, or merged as their deltas come.

Whatever route made it, a ``Generation`` runs here; outputs of chats have been read by the parsers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from treadle.api.sampling_params import SamplingParams
from treadle.errors import RequestError
from treadle.outputs import CompletionOutput, RequestOutput
from treadle.text.chat import ChatOutputParser, PreparedChat
from treadle.text.prompts import Prompt, prompt_at
from treadle_server.context import ServerContext
from treadle_server.errors import APIError
from treadle_server.logs import request_id, unenforced
from treadle_server.wire.common import SamplingFields

__all__ = ("Generation", "PromptOutput", "merged_outputs", "whole_outputs")

MAX_LABEL = 128
"""Characters that the engine takes for the name of a request, in which its log quotes it."""
PromptOutput = tuple[int, RequestOutput]
"""The index of a prompt, and an output of it."""


class Generation(msgspec.Struct, kw_only=True, frozen=True):
    """A checked request, ready for the engine.

    With ``discard_output`` the one token that the engine must make is dropped: the client asked
    for ``max_tokens`` 0, to see its prompt scored.
    """

    id: str
    created_time: int
    request: SamplingFields
    prompts: list[Prompt]
    params: SamplingParams
    chat: PreparedChat | None = None
    num_best: int | None = None
    """How many of the outputs of a prompt are answered with, the most probable ones; ``None`` is all."""
    discard_output: bool = False

    def create_parser(self) -> ChatOutputParser | None:
        return None if self.chat is None else self.chat.create_parser()

    def label(self, index: int) -> str:
        """Return the engine's name of the request of one prompt."""
        return self.id if len(self.prompts) == 1 else f"{self.id}-{index}"


async def whole_outputs(context: ServerContext, generation: Generation) -> list[RequestOutput]:
    """Run all prompts concurrently and return their final outputs. The first failure ends the others."""
    if len(generation.prompts) == 1:
        return [await _collect(context, generation, 0)]
    indices = range(len(generation.prompts))
    tasks = [asyncio.create_task(_collect(context, generation, i)) for i in indices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def merged_outputs(
    context: ServerContext, generation: Generation
) -> AsyncGenerator[list[PromptOutput], None]:
    """Yield outputs as they arrive, each time all since the last yield."""
    if len(generation.prompts) == 1:
        async with aclosing(_outputs(context, generation, 0)) as outputs:
            async for output in outputs:
                yield [(0, output)]
        return
    ready: list[PromptOutput] = []
    wakeup = asyncio.Event()

    async def pump(index: int) -> None:
        try:
            async with aclosing(_outputs(context, generation, index)) as outputs:
                async for output in outputs:
                    ready.append((index, output))
                    wakeup.set()
        finally:
            wakeup.set()

    tasks = [asyncio.create_task(pump(i)) for i in range(len(generation.prompts))]
    try:
        running = set(tasks)
        while running or ready:
            if not ready:
                await wakeup.wait()
            wakeup.clear()
            for task in [t for t in running if t.done()]:
                running.discard(task)
                task.result()
            if ready:
                batch = ready[:]
                ready.clear()
                yield batch
    finally:
        await _cancel(tasks)


async def _outputs(
    context: ServerContext, generation: Generation, index: int
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs of one prompt. Raises ``APIError`` if the engine fails on one of them, and
    ``RequestError`` if the request is to blame."""
    parser = generation.create_parser()
    label = f"{generation.label(index)} {request_id.get()}".strip()[:MAX_LABEL]
    source = context.engine.generate(generation.prompts[index], generation.params, request_id=label)
    with (
        context.observers.recorded(generation) as record,
        prompt_at(index, len(generation.prompts)),
    ):
        async with aclosing(source) as outputs:
            async for output in outputs:
                for completion in output.outputs:
                    if completion.finish_reason == "error":
                        raise _failure(completion)
                if parser is not None:
                    output = await parser.parse(output)
                if output.unenforced and (notes := unenforced.get()) is not None:
                    notes[output.unenforced] = None
                if record is not None:
                    record.add(output)
                yield output


async def _collect(context: ServerContext, generation: Generation, index: int) -> RequestOutput:
    last: RequestOutput | None = None
    async with aclosing(_outputs(context, generation, index)) as outputs:
        async for output in outputs:
            last = output
    if last is None:
        raise APIError(500, "the engine gave no output for this request", code="request_failed")
    last.outputs.sort(key=lambda completion: completion.index)
    return last


def _failure(completion: CompletionOutput) -> Exception:
    text = completion.error or "the engine failed on this request; its log has the details"
    if completion.error_param is not None:
        return RequestError(text, param=completion.error_param)
    return APIError(500, text, code="request_failed")


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel all tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
