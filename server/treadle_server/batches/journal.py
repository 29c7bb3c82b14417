"""The answers of a batch, in files that grow by whole lines and say by themselves what is done.

Nothing else records how far a batch is: whoever opens the files again, after a stop, a crash or a
``kill -9``, reads which requests are answered, and removes a last line that was not written whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from treadle_server.batches.lines import LineReader
from treadle_server.batches.wire import BatchCounts, BatchUsage, LineFailure, LineOutput

__all__ = ("Journal", "JournalError", "id_digest")

MAX_LINE_BYTES = 2**30
"""No bound on what is read back: it was written here."""
TAIL_BYTES = 2**16
START = b'{"id":"batch_req_'
"""How every line begins."""


class JournalError(Exception):
    """A file cannot be continued, because it is not the output of a batch, or is in use."""


class _WrittenBody(msgspec.Struct):
    usage: dict[str, Any] | None = None


class _WrittenResponse(msgspec.Struct):
    status_code: int
    body: _WrittenBody


class _WrittenLine(msgspec.Struct):
    """What is read back of a ``LineOutput``."""

    id: str
    custom_id: str | None
    response: _WrittenResponse | None
    error: LineFailure | None


class _LineFile:
    """A file to which whole lines are added; a write that fails leaves none of its line."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise JournalError(
                f"{path} is being written by another process; wait for it, or choose another file"
            ) from None
        self.size = os.fstat(self._fd).st_size

    def cut_half_line(self, path: Path) -> None:
        """Remove what follows the last line end. Raises ``JournalError`` if it was not written here."""
        tail, end = b"", self.size
        while end and b"\n" not in tail:
            start = max(0, end - TAIL_BYTES)
            tail, end = os.pread(self._fd, end - start, start), start
        end = end + tail.rfind(b"\n") + 1
        beginning = os.pread(self._fd, len(START), end)
        if not START.startswith(beginning):
            raise JournalError(foreign(path, "the text after its last line end"))
        os.ftruncate(self._fd, end)
        self.size = end

    def append(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self.size + written)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


class Journal:
    """The output of one batch: answers in one file, errors in another, or both in one.

    ``counts`` and ``usage`` are of what the files have. Writing happens in a thread, in order; on
    return a line is in the file. ``reserve`` is called with the bytes of a line before it is written, and
    may raise; with a number below 0 for bytes that are not in the file.
    """

    def __init__(
        self,
        output: Path,
        errors: Path | None = None,
        reserve: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.counts, self.usage = BatchCounts(), BatchUsage()
        self._paths = [output] if errors is None else [output, errors]
        self._reserve = reserve
        self._files: list[_LineFile] = []
        self._done_ids: set[bytes] = set()
        self._done_lines: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "treadle-journal")

    async def open(self) -> None:
        """Read what there is and remove half a line. Raises ``OSError``, ``JournalError``."""
        try:
            await self._in_thread(self._open)
        except BaseException:
            await self.close()
            raise

    async def write(self, output: LineOutput) -> None:
        """Add one line. Raises ``OSError``, and what ``reserve`` raises; nothing is written then."""
        await self._in_thread(self._write, output)

    async def close(self) -> None:
        """Wait until all is written that was begun, also for writers that were cancelled.

        Cancelling it does not leave the files open: it raises ``CancelledError`` when they are closed.
        """
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)
        is_cancelled = False
        while not closing.done():
            try:
                await asyncio.wait((closing,))
            except asyncio.CancelledError:
                is_cancelled = True
        closing.result()
        if is_cancelled:
            raise asyncio.CancelledError

    def has_id(self, custom_id: str) -> bool:
        """Whether the request of that name is answered."""
        return id_digest(custom_id) in self._done_ids

    def has_line(self, number: int) -> bool:
        """Whether the line, which is no request, is answered."""
        return number in self._done_lines

    async def _in_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # -- in the thread -----------------------------------------------------------------

    def _open(self) -> None:
        for path in self._paths:
            file = _LineFile(path)
            self._files.append(file)
            old_size = file.size
            file.cut_half_line(path)
            self._reserve(file.size - old_size)
            self._read(path)

    def _read(self, path: Path) -> None:
        decoder = msgspec.json.Decoder(_WrittenLine)
        with path.open("rb") as file:
            reader = LineReader(file, MAX_LINE_BYTES)
            while lines := reader.read():
                for line in lines:
                    try:
                        written = decoder.decode(line.data or b"")
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        raise JournalError(foreign(path, f"its line {line.number}")) from None
                    response = written.response
                    usage = None if response is None else response.body.usage
                    self._count(written, None if response is None else response.status_code, usage)

    def _write(self, output: LineOutput) -> None:
        data = msgspec.json.encode(output) + b"\n"
        response = output.response
        status = None if response is None else response.status_code
        self._reserve(len(data))
        try:
            self._files[0 if is_success(status) else -1].append(data)
        except OSError:
            self._reserve(-len(data))
            raise
        usage = None if response is None else getattr(response.body, "usage", None)
        self._count(output, status, None if usage is None else msgspec.to_builtins(usage))

    def _count(
        self, line: LineOutput | _WrittenLine, status: int | None, usage: dict[str, Any] | None
    ) -> None:
        if line.error is not None and line.error.line is not None:
            self._done_lines.add(line.error.line)
        elif line.custom_id is not None:
            self._done_ids.add(id_digest(line.custom_id))
        if is_success(status):
            self.counts.completed += 1
        else:
            self.counts.failed += 1
        self._add_usage(usage or {})

    def _add_usage(self, usage: dict[str, Any]) -> None:
        """Add the usage of a completion or of a response, which have other names for it."""
        total = self.usage
        prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
        output = usage.get("completion_tokens", usage.get("output_tokens", 0))
        inside = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        outside = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        total.input_tokens += prompt
        total.output_tokens += output
        total.total_tokens += prompt + output
        total.input_tokens_details.cached_tokens += inside.get("cached_tokens", 0)
        total.output_tokens_details.reasoning_tokens += outside.get("reasoning_tokens", 0)

    def _close(self) -> None:
        while self._files:
            self._files.pop().close()


def is_success(status: int | None) -> bool:
    return status is not None and status < 400


def id_digest(custom_id: str) -> bytes:
    """Return what stands for an id in a set, which may have very many of them."""
    return blake2b(custom_id.encode(), digest_size=16).digest()


def foreign(path: Path, what: str) -> str:
    return f"{path} cannot be continued: {what} is not the output of a batch; choose another file"
