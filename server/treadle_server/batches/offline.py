"""A batch without a server: the engine of this program answers the lines of a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from treadle.config import EngineConfig
from treadle_server.batches.endpoints import ENDPOINTS, BatchClient, LineExecutor
from treadle_server.batches.journal import Journal
from treadle_server.batches.runner import (
    Answers,
    BatchInput,
    LineSource,
    is_answered,
    run_lines,
)
from treadle_server.batches.wire import BatchCounts, LineOutput
from treadle_server.config import ServerConfig
from treadle_server.context import ServerContext

__all__ = ("answer_file", "answer_lines")

T = TypeVar("T")
CLIENT = BatchClient(name="batch")


def answer_file(
    engine: EngineConfig, path: Path, output: Path, on_progress: Callable[[BatchCounts], Any]
) -> BatchCounts:
    """Answer the requests of a file in ``output``, and continue one that was stopped.

    ``on_progress`` gets the counts at the start and after each line. The engine starts only if there is
    something left to do. Raises ``OSError``, ``JournalError`` if
    ``output`` is something else, what a start of the engine raises, ``EngineDeadError``, and after
    Ctrl-C ``KeyboardInterrupt``: what is answered until then is kept.
    """
    limit = ServerConfig().max_body_bytes
    source = BatchInput(path=path, endpoints=tuple(ENDPOINTS), max_line_bytes=limit)

    async def run() -> BatchCounts:
        journal = _CountingJournal(output, on_progress)
        await journal.open()
        try:
            num_left = await _count(source, journal)
            on_progress(journal.counts)
            if num_left:
                await _answer(engine, source, journal)
        finally:
            await journal.close()
        return journal.counts

    return _run(run())


def answer_lines(engine: EngineConfig, source: LineSource, answers: Answers) -> None:
    """Answer requests from anywhere to anywhere. Raises what ``answer_file`` does."""
    _run(_answer(engine, source, answers))


class _CountingJournal(Journal):
    def __init__(self, path: Path, on_progress: Callable[[BatchCounts], Any]) -> None:
        super().__init__(path)
        self._on_progress = on_progress

    async def write(self, output: LineOutput) -> None:
        await super().write(output)
        self._on_progress(self.counts)


async def _count(source: LineSource, journal: Journal) -> int:
    """Set the total of the journal, and return how many lines have no answer yet."""
    num_left = 0
    async with aclosing(source.lines()) as lines:
        async for line, request in lines:
            journal.counts.total += 1
            num_left += not is_answered(journal, line, request)
    return num_left


async def _answer(config: EngineConfig, source: LineSource, answers: Answers) -> None:
    from treadle.entrypoints.async_llm import AsyncLLM

    limits = config.scheduler
    # As many as run and as many again, so that the engine never waits for a line.
    max_lines = limits.max_num_seqs + min(limits.max_num_seqs, limits.max_num_queued_reqs)
    async with AsyncLLM(config=config) as engine:
        context = ServerContext(engine, ServerConfig(max_stored_responses=0))
        try:
            await run_lines(source, LineExecutor(context, CLIENT), answers, max_lines)
        finally:
            context.close()


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
