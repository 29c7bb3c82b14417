"""The outputs of one request on their way to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from treadle.errors import TreadleError
from treadle.outputs import RequestOutput
from treadle.processes.failure import Failure
from treadle.text.output_processor import merge_deltas

__all__ = ("OutputStream",)


class OutputStream:
    """An asynchronous iterator over the outputs of one request; the last one is ``finished``.

    It holds one output at most: deltas are merged, whole outputs replace each other, so a slow
    reader costs no more memory than its request's text. Whoever leaves before the end calls
    ``aclose``, which aborts the request; a cancelled ``__anext__`` does not. One writer and one
    reader, both in one event loop.
    """

    def __init__(
        self, request_id: str, delta: bool, on_close: Callable[[OutputStream], None]
    ) -> None:
        """``on_close`` is called once, when the reader is done."""
        self.request_id = request_id
        self._delta = delta
        self._on_close = on_close
        self._is_closed = False
        self._output: RequestOutput | None = None
        self._error: TreadleError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        waiting = self._output
        self._output = (
            merge_deltas(waiting, output) if waiting is not None and self._delta else output
        )
        self._wake()

    def fail(self, error: TreadleError) -> None:
        """The reader gets what is there, then ``error``."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises what ``fail`` was given."""
        while self._output is None:
            if self._is_closed:
                raise StopAsyncIteration
            if self._error is not None:
                self._close()
                raise _copy_error(self._error)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._output = self._output, None
        if output.finished:
            self._close()
        return output

    async def aclose(self) -> None:
        """Abort the request unless it is finished. May be called twice."""
        self._output = None
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self)


def _copy_error(error: TreadleError) -> TreadleError:
    """An exception for one reader: raising one object in several tasks mixes their tracebacks."""
    error_copy = Failure.of(error).error()
    error_copy.__cause__ = error.__cause__
    return error_copy
