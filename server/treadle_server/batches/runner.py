"""Runs the lines of one input file: a bounded number at once, each answered by a line of the journal.

The server and the command line run batches with it. It keeps no more than the lines that run, and a
digest of each id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import msgspec

from treadle_server.batches.endpoints import LineExecutor, failure_output
from treadle_server.batches.journal import id_digest
from treadle_server.batches.lines import InputLine, LineError, parse_line, read_lines
from treadle_server.batches.wire import BatchLine, LineOutput

__all__ = (
    "Answers",
    "BatchInput",
    "LineSource",
    "Parsed",
    "answer_rest",
    "is_answered",
    "run_lines",
)


class BatchInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input file, the endpoints that its lines may name, and the most bytes of a line."""

    path: Path
    endpoints: Collection[str]
    max_line_bytes: int

    async def lines(self) -> AsyncGenerator[Parsed, None]:
        """Yield each line that is not blank, as a request or as what is wrong with it.

        An id is good once. Raises ``OSError``.
        """
        seen: set[bytes] = set()
        async with aclosing(read_lines(self.path, self.max_line_bytes)) as lines:
            async for line in lines:
                yield line, self._parse(line, seen)

    def _parse(self, line: InputLine, seen: set[bytes]) -> BatchLine | LineError:
        try:
            request = parse_line(line, self.endpoints, self.max_line_bytes)
        except LineError as error:
            return error
        digest = id_digest(request.custom_id)
        if digest in seen:
            return LineError(
                "duplicate_custom_id",
                f"custom_id is {request.custom_id[:80]!r}, as on an earlier line; each line needs "
                "its own",
                param="custom_id",
                custom_id=request.custom_id,
            )
        seen.add(digest)
        return request


Parsed = tuple[InputLine, BatchLine | LineError]


class LineSource(Protocol):
    """Where lines come from: ``BatchInput``, or what makes requests of something else."""

    def lines(self) -> AsyncGenerator[Parsed, None]: ...


class Answers(Protocol):
    """Where answers go: ``Journal``, or what shows them to somebody."""

    def has_id(self, custom_id: str) -> bool: ...
    def has_line(self, number: int) -> bool: ...
    async def write(self, output: LineOutput) -> None: ...


async def run_lines(
    source: LineSource, executor: LineExecutor, answers: Answers, max_lines: int
) -> None:
    """Answer all lines that have no answer yet, at most ``max_lines`` at once.

    Cancelling stops those that run. Raises ``OSError``, ``EngineDeadError`` and what ``answers`` raises.
    """

    slots = asyncio.Semaphore(max_lines)

    async def answer(number: int, request: BatchLine | LineError) -> None:
        if isinstance(request, LineError):
            text = f"line {number}: {request}"
            output = failure_output(request.custom_id, request.code, text, number)
        else:
            output = await executor.execute(request)
        await answers.write(output)

    try:
        async with asyncio.TaskGroup() as tasks, aclosing(source.lines()) as lines:
            async for line, request in lines:
                if not is_answered(answers, line, request):
                    await slots.acquire()
                    task = tasks.create_task(answer(line.number, request))
                    task.add_done_callback(lambda _: slots.release())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def answer_rest(source: LineSource, answers: Answers, code: str, message: str) -> None:
    """Answer all lines that have no answer yet with an error."""
    async with aclosing(source.lines()) as lines:
        async for line, request in lines:
            if not is_answered(answers, line, request):
                await answers.write(failure_output(request.custom_id, code, message))


def is_answered(answers: Answers, line: InputLine, request: BatchLine | LineError) -> bool:
    """Whether a line has its answer: a request by its id, what is no request by its number."""
    if isinstance(request, LineError):
        return answers.has_line(line.number)
    return answers.has_id(request.custom_id)
