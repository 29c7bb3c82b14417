"""``AsyncLLMEngine``: the engine in its own process, for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import treadle

from .engine_args import EngineArgs
from .llm import refuse, treadle_params
from .outputs import RequestOutput, from_treadle
from .sampling_params import SamplingParams

__all__ = ("AsyncLLM", "AsyncLLMEngine")


class AsyncLLM:
    """Generates text without blocking the event loop. The first request starts the engine."""

    def __init__(self, **options: Any) -> None:
        self.engine = treadle.AsyncLLM(**{k: v for k, v in options.items() if v is not None})
        self._life = self._keep()
        self._is_kept = False
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> AsyncLLM:
        return cls(**engine_args.options)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields its output as it grows. Leaving the loop aborts the request."""
        refuse("AsyncLLM.generate", others)
        if not self._is_kept:
            self._is_kept = True
            await anext(self._life)
        stream = self.engine.generate(
            prompt,
            treadle_params(sampling_params),
            request_id=request_id,
            priority=priority or None,
        )
        try:
            async for output in stream:
                yield from_treadle(output)
        finally:
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    async def check_health(self) -> None:
        """Raises ``EngineDeadError`` if the engine is dead."""
        await self.engine.health()

    def shutdown(self) -> None:
        """Begin to end the engine process; the event loop finishes it, also while it closes."""
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _keep(self) -> AsyncGenerator[None, None]:
        """End the engine when this generator is closed, at the latest by a loop that closes."""
        try:
            yield
        finally:
            try:
                await self.engine.shutdown()
            except asyncio.CancelledError:  # a loop that closes cancels all tasks first
                await self.engine.shutdown()
                raise

    async def _end(self) -> None:
        # A task that is cancelled before its first step must not have touched the generator.
        await self._life.aclose()


AsyncLLMEngine = AsyncLLM
