"""``POST /v1/files``: a form with a file, written to the disk while it comes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
from litestar import Request
from multipart import MultipartError, MultipartSegment, PushMultipartParser

from treadle.errors import RequestError
from treadle_server.batches.files import FileStore, StorageFullError, disk_error
from treadle_server.batches.wire import FileObject, Lifetime, Purpose
from treadle_server.errors import APIError

__all__ = ("receive_file",)

MAX_PARTS, MAX_FIELD_BYTES, MAX_FILENAME = 16, 1024, 255
BLOCK_BYTES = 2**20
"""Bytes of a file in memory before they are written."""


class Upload:
    """One form that is being received. ``fields`` are its texts, by name."""

    def __init__(self, store: FileStore, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        self.path = store.new_upload()
        self.filename: str | None = None
        self.fields: dict[str, bytearray] = {}
        self.num_bytes = 0
        self._block = bytearray()
        self._part: MultipartSegment | None = None

    async def receive(self, request: Request[Any, Any, Any], boundary: str) -> None:
        """Write the file of a form. Raises ``APIError`` or ``RequestError``, and ``OSError``."""
        parser = PushMultipartParser(boundary, max_segment_count=MAX_PARTS)
        with self.path.open("xb") as file:
            await self._receive(request, parser, file)

    async def _receive(
        self, request: Request[Any, Any, Any], parser: PushMultipartParser, file: BinaryIO
    ) -> None:
        try:
            async for chunk in request.stream():
                if chunk and not parser.closed:
                    for event in parser.parse(chunk):
                        self._handle(event)
                    if len(self._block) >= BLOCK_BYTES:
                        await self._flush(file)
            parser.close()
            await self._flush(file)
        except MultipartError as error:
            raise APIError(400, f"the form cannot be read: {error}", code="invalid_form") from None

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._store.reserve(-self.num_bytes)
        self.num_bytes = 0

    def text(self, name: str) -> str | None:
        """Return a field of the form. Raises ``RequestError``."""
        value = self.fields.get(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise RequestError(f"{name} is not valid UTF-8", param=name) from None

    def _handle(self, event: MultipartSegment | bytearray | bytes | None) -> None:
        if isinstance(event, MultipartSegment):
            self._part = event
            if event.name == "file":
                if self.filename is not None:
                    raise RequestError("the form has two files; send one", param="file")
                self.filename = visible_name(event.filename)
            else:
                self.fields[event.name or ""] = bytearray()
        elif event is None or self._part is None:
            self._part = None
        elif self._part.name == "file":
            self._add(event)
        else:
            field = self.fields[self._part.name or ""]
            field += event
            if len(field) > MAX_FIELD_BYTES:
                name = (self._part.name or "")[:64]
                raise RequestError(
                    f"{name} has more than {MAX_FIELD_BYTES} bytes", param=name or None
                )

    def _add(self, piece: bytearray | bytes) -> None:
        if self.num_bytes + len(piece) > self._max_bytes:
            raise too_large(self._max_bytes)
        try:
            self._store.reserve(len(piece))
        except StorageFullError as error:
            raise APIError(413, str(error), param="file", code="storage_full") from None
        self.num_bytes += len(piece)
        self._block += piece

    async def _flush(self, file: BinaryIO) -> None:
        block, self._block = self._block, bytearray()
        await asyncio.to_thread(write_block, file, block)


def write_block(file: BinaryIO, block: bytearray) -> None:
    file.write(block)
    file.flush()


async def receive_file(
    store: FileStore, request: Request[Any, Any, Any], owner: str, max_bytes: int
) -> FileObject:
    """Receive the form of ``request`` and keep its file. Raises ``APIError`` or ``RequestError``."""
    kind, options = request.content_type
    if kind != "multipart/form-data" or not options.get("boundary"):
        raise APIError(
            415,
            f"the content type is {kind[:64]!r}; send a form (multipart/form-data) with the fields "
            "purpose and file",
        )
    if (request.content_length or 0) > max_bytes + MAX_PARTS * (MAX_FIELD_BYTES + 4096):
        raise too_large(max_bytes)
    upload = Upload(store, max_bytes)
    try:
        await upload.receive(request, options["boundary"])
        purpose, lifetime = purpose_of(upload), lifetime_of(upload)
        if upload.filename is None:
            raise RequestError("file is missing; send a form with the field file", param="file")
        store.check_room(1)  # others may have been quicker
        file = store.adopt(
            upload.path,
            owner,
            filename=upload.filename,
            purpose=purpose,
            lifetime=None if lifetime is None else lifetime.seconds,
        )
        upload.num_bytes = 0  # they belong to the file now
        return file
    except OSError as error:
        raise disk_error(error, "the file could not be written") from error
    finally:
        upload.discard()


def purpose_of(upload: Upload) -> str:
    purpose = upload.text("purpose")
    if purpose is None or purpose not in get_args(Purpose):
        problem = "is missing" if purpose is None else f"is {purpose[:64]!r}"
        raise RequestError(
            f"purpose {problem}; it must be one of {', '.join(get_args(Purpose))}", param="purpose"
        )
    return purpose


def lifetime_of(upload: Upload) -> Lifetime | None:
    names = ("anchor", "seconds")
    values = {name: upload.text(f"expires_after[{name}]") for name in names}
    if not any(values.values()):
        return None
    try:
        return msgspec.convert(values, Lifetime, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"expires_after: {error}", param="expires_after") from None


def visible_name(name: str | None) -> str:
    """Return what a list shows as the name of a file: nothing of the client's folders."""
    base = Path((name or "").replace("\\", "/")).name
    return "".join(c for c in base if c.isprintable())[:MAX_FILENAME] or "upload"


def too_large(limit: int) -> APIError:
    return APIError(
        413,
        f"the file has more than {limit} bytes (--max-file-bytes): split it",
        param="file",
        code="file_too_large",
    )
