"""Running prompts on the engine: all to the end, or merged as their deltas come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from treadle.api.sampling_params import SamplingParams
from treadle.outputs import CompletionOutput, RequestOutput
from treadle_server.engine import Engine, Prompt
from treadle_server.errors import APIError

__all__ = ("check", "final", "finals", "merged")


async def final(
    engine: Engine, prompt: Prompt, params: SamplingParams, request_id: str
) -> RequestOutput:
    """Run one prompt to its end."""
    last: RequestOutput | None = None
    async with aclosing(engine.generate(prompt, params, request_id=request_id)) as outputs:
        async for output in outputs:
            last = output
    if last is None:
        raise APIError(500, "the engine gave no output for this request", code="request_failed")
    for one in last.outputs:
        check(one)
    return last


async def finals(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, request_id: str
) -> list[RequestOutput]:
    """Run prompts side by side. The first failure ends the others."""
    if len(prompts) == 1:
        return [await final(engine, prompts[0], params, request_id)]
    tasks = [
        asyncio.create_task(final(engine, prompt, params, f"{request_id}-{i}"))
        for i, prompt in enumerate(prompts)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(tasks)


async def merged(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, request_id: str
) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """Yield ``(prompt, output)`` pairs, in each turn all that have come since the last."""
    if len(prompts) == 1:
        async with aclosing(engine.generate(prompts[0], params, request_id=request_id)) as outputs:
            async for output in outputs:
                yield [(0, output)]
        return
    ready: list[tuple[int, RequestOutput]] = []
    news = asyncio.Event()

    async def pump(index: int) -> None:
        try:
            label = f"{request_id}-{index}"
            source = engine.generate(prompts[index], params, request_id=label)
            async with aclosing(source) as outputs:
                async for output in outputs:
                    ready.append((index, output))
                    news.set()
        finally:
            news.set()

    tasks = [asyncio.create_task(pump(i)) for i in range(len(prompts))]
    try:
        running = set(tasks)
        while running or ready:
            if not ready:
                await news.wait()
            news.clear()
            for task in [t for t in running if t.done()]:
                running.discard(task)
                task.result()
            if ready:
                batch = ready[:]
                ready.clear()
                yield batch
    finally:
        await cancelled(tasks)


def check(output: CompletionOutput) -> None:
    """Raise if the engine has given up on this output."""
    if output.finish_reason == "error":
        text = output.error or "the engine failed on this request; its log has the details"
        raise APIError(500, text, code="request_failed")


async def cancelled(tasks: Sequence[asyncio.Task[object]]) -> None:
    """End all tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
