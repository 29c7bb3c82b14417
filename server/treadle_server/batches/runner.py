"""Runs the lines of one input file: a bounded number at once, each answered by a line of the journal.

The server and the command line run batches with it. It keeps no more than the lines that run, and a
digest of each id.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import msgspec

from treadle_server.active_requests import ActiveRequests
from treadle_server.batches.endpoints import LineExecutor, failure_output
from treadle_server.batches.journal import Journal, id_digest
from treadle_server.batches.lines import InputLine, LineError, parse_line, read_lines
from treadle_server.batches.wire import BatchLine

__all__ = ("BatchInput", "LineSlots", "Slots", "answer_rest", "run_lines")


class BatchInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input file, the endpoints that its lines may name, and the most bytes of a line."""

    path: Path
    endpoints: Collection[str]
    max_line_bytes: int

    async def lines(self) -> AsyncGenerator[tuple[InputLine, BatchLine | LineError], None]:
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


class Slots(Protocol):
    """Bounds the lines that run at once; a ``Semaphore`` is one."""

    async def acquire(self) -> object: ...
    def release(self) -> None: ...


async def run_lines(
    source: BatchInput, executor: LineExecutor, journal: Journal, slots: Slots
) -> None:
    """Answer all lines that the journal has no answer to. Cancelling stops those that run.

    Raises ``OSError``, ``EngineDeadError`` and what the journal raises.
    """

    async def answer(number: int, request: BatchLine | LineError) -> None:
        if isinstance(request, LineError):
            text = f"line {number}: {request}"
            output = failure_output(request.custom_id, request.code, text, number)
        else:
            output = await executor.execute(request)
        await journal.write(output)

    try:
        async with asyncio.TaskGroup() as tasks, aclosing(source.lines()) as lines:
            async for line, request in lines:
                if not is_answered(journal, line, request):
                    await slots.acquire()
                    task = tasks.create_task(answer(line.number, request))
                    task.add_done_callback(lambda _: slots.release())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def answer_rest(source: BatchInput, journal: Journal, code: str, message: str) -> None:
    """Answer all lines that the journal has no answer to with an error."""
    async with aclosing(source.lines()) as lines:
        async for line, request in lines:
            if not is_answered(journal, line, request):
                await journal.write(failure_output(request.custom_id, code, message))


def is_answered(journal: Journal, line: InputLine, request: BatchLine | LineError) -> bool:
    if isinstance(request, LineError):
        return journal.has_line(line.number)
    return journal.has_id(request.custom_id)


class LineSlots:
    """The slots for lines of all batches of a server. Requests of clients go first.

    A line starts only while fewer than ``max_sequences`` requests and lines run, so that no request ever
    waits in the engine behind a line, and at most ``max_lines`` lines do.
    """

    def __init__(self, requests: ActiveRequests, max_lines: int, max_sequences: int) -> None:
        self._requests = requests
        self._max_lines, self._max_sequences = max_lines, max_sequences
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.num_taken = 0
        requests.on_end = self._wake

    async def acquire(self) -> None:
        """Wait for a slot. The first to wait is the first to get one."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        self.num_taken -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self._has_room():
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.num_taken += 1
                waiter.set_result(None)

    def _has_room(self) -> bool:
        num_running = self.num_taken + len(self._requests)
        return self.num_taken < self._max_lines and num_running < self._max_sequences
