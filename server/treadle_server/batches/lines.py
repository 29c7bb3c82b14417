"""The lines of an input file, read in pieces and checked one by one.

A file may be larger than the memory, and so may one of its lines: no more than ``max_bytes`` of a line
are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from typing import BinaryIO

import msgspec

from treadle_server.batches.wire import BatchLine
from treadle_server.decode import check_depth, check_numbers, invalid
from treadle_server.errors import APIError

__all__ = ("InputLine", "LineError", "LineReader", "parse_line", "read_lines")

CHUNK_BYTES = 2**17
MARK = b"\xef\xbb\xbf"
"""What some editors begin a file with."""
decoder = msgspec.json.Decoder(BatchLine)
id_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class InputLine(msgspec.Struct, frozen=True):
    """A line that is not blank. ``number`` counts from 1; ``data`` is ``None`` if it is too long."""

    number: int
    data: bytes | None


class LineError(Exception):
    """A line is no request. ``custom_id`` is ``None`` if it cannot be read either."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.custom_id = code, param, custom_id


class LineReader:
    """Splits a file into lines. ``read`` blocks and belongs in a thread."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._rest = bytearray()
        self._is_too_long = self._is_at_end = False
        self._number = 0

    def read(self) -> list[InputLine]:
        """Return the next lines, an empty list at the end of the file. Raises ``OSError``."""
        while not self._is_at_end:
            chunk = self._file.read(CHUNK_BYTES)
            self._is_at_end = not chunk
            if lines := self._split(chunk):
                return lines
        return []

    def _split(self, chunk: bytes) -> list[InputLine]:
        *ends, rest = chunk.split(b"\n")
        lines = []
        for end in ends:
            self._extend(end)
            lines.append(self._take())
        self._extend(rest)
        if self._is_at_end:
            lines.append(self._take())
        return [line for line in lines if line is not None]

    def _extend(self, piece: bytes) -> None:
        if len(self._rest) + len(piece) > self._max_bytes + 1:  # one for a carriage return
            self._is_too_long = True
            self._rest.clear()
        elif not self._is_too_long:
            self._rest += piece

    def _take(self) -> InputLine | None:
        data, is_too_long = bytes(self._rest).rstrip(b"\r"), self._is_too_long
        self._rest.clear()
        self._is_too_long = False
        self._number += 1
        if self._number == 1:
            data = data.removeprefix(MARK)
        if is_too_long or len(data) > self._max_bytes:
            return InputLine(self._number, None)
        return InputLine(self._number, data) if data.strip() else None


async def read_lines(path: Path, max_bytes: int) -> AsyncGenerator[InputLine, None]:
    """Yield the lines of a file without holding up the event loop. Raises ``OSError``."""
    with path.open("rb") as file:
        reader = LineReader(file, max_bytes)
        while lines := await asyncio.to_thread(reader.read):
            for line in lines:
                yield line


def parse_line(line: InputLine, endpoints: Collection[str], max_bytes: int) -> BatchLine:
    """Return the request on a line, for one of ``endpoints``. Raises ``LineError``.

    The body is decoded when it is run: it is an error of its own request, not of the file.
    """
    if line.data is None:
        raise LineError(
            "line_too_long", f"the line has more than {max_bytes} bytes; send less in one request"
        )
    try:
        check_depth(line.data)
        check_numbers(line.data)
        request = decoder.decode(line.data)
    except APIError as error:
        raise LineError("invalid_json_line", str(error)) from None
    except msgspec.ValidationError as error:
        detail = invalid(error).detail
        is_missing = "missing required" in detail.message
        raise LineError(
            "missing_required_parameter" if is_missing else "invalid_request_line",
            f"{detail.message}; a line is a JSON object with custom_id, method, url and body",
            param=detail.param,
            custom_id=custom_id_of(line.data),
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(
            "invalid_json_line", f"the line is not valid JSON in UTF-8: {error}"
        ) from None
    if request.method != "POST":
        raise LineError(
            "invalid_method",
            f"method is {request.method[:64]!r}; it must be POST",
            param="method",
            custom_id=request.custom_id,
        )
    if request.url not in endpoints:
        raise LineError(
            "invalid_url",
            f"url is {request.url[:80]!r}; it must be {' or '.join(sorted(endpoints))}",
            param="url",
            custom_id=request.custom_id,
        )
    return request


def custom_id_of(data: bytes) -> str | None:
    """Return the id of a line that is an object but no request."""
    try:
        return msgspec.json.decode(id_decoder.decode(data)["custom_id"], type=str)[:512]
    except (msgspec.MsgspecError, LookupError, UnicodeDecodeError):
        return None
