"""The files that clients have uploaded and that batches have made, on disk, with bounds.

A file is found by its id in a table; no path is ever built from what a client sends.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from treadle_server.batches.storage import Folder, write_whole
from treadle_server.batches.wire import FileObject
from treadle_server.config import ServerConfig
from treadle_server.errors import APIError

__all__ = ("FileRecord", "FileStore", "StorageFullError", "disk_error")

log = logging.getLogger("treadle.server")


class StorageFullError(Exception):
    """The files take as many bytes as they may."""


class FileRecord(msgspec.Struct, frozen=True):
    """A file, and the API key that it belongs to. ``created_ns`` orders the files of one second."""

    owner: str
    file: FileObject
    created_ns: int = msgspec.field(default_factory=time.time_ns)


class FileStore:
    """All files of a server. Methods block for a file operation at most; none reads a content."""

    def __init__(self, folder: Folder, config: ServerConfig) -> None:
        self._folder, self._config = folder, config
        self._records: dict[str, FileRecord] = {}
        self._uses: dict[str, set[str]] = {}
        """The batches that read a file, by the file's id."""
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Bytes of all files, those that are still written included."""
        self._load()

    def __contains__(self, id: str) -> bool:
        return id in self._records

    # -- reading -----------------------------------------------------------------------

    def get(self, owner: str, id: str) -> FileObject:
        """Return a file of ``owner``. Raises ``APIError`` (404)."""
        self.remove_expired()
        record = self._records.get(id)
        if record is None or record.owner != owner:
            raise APIError(
                404,
                f"there is no file {id[:80]!r}: it was never uploaded with this key, was deleted, or "
                "has expired",
                param="file_id",
                code="file_not_found",
            )
        return record.file

    def list(self, owner: str) -> list[FileObject]:
        """Return the files of ``owner``, the oldest first."""
        self.remove_expired()
        return [record.file for record in self._records.values() if record.owner == owner]

    def content_path(self, file: FileObject) -> Path:
        return self._folder.files / f"{file.id}.data"

    # -- writing -----------------------------------------------------------------------

    def new_upload(self) -> Path:
        """Return where to write a file that is being uploaded. Raises ``APIError``."""
        self.remove_expired()
        self.check_room(1)
        return self._folder.uploads / secrets.token_hex(12)

    def check_room(self, count: int) -> None:
        """Raise ``APIError`` (400) unless so many more files may be kept."""
        if len(self._records) + count > self._config.max_files:
            raise APIError(
                400,
                f"{len(self._records)} files are kept, and at most {self._config.max_files} may be, "
                "those that batches are going to make included (--max-files): delete some",
                code="too_many_files",
            )

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are going to be written, or, below 0, that were not. Safe in threads.

        Raises ``StorageFullError``.
        """
        limit = self._config.max_stored_file_bytes
        with self._lock:
            if num_bytes > 0 and self.num_bytes + num_bytes > limit:
                raise StorageFullError(
                    f"the files would take more than {limit} bytes (--max-stored-file-bytes): delete "
                    "some"
                )
            self.num_bytes += num_bytes

    def adopt(
        self,
        path: Path,
        owner: str,
        *,
        filename: str,
        purpose: str,
        id: str | None = None,
        lifetime: int | None = None,
        must_last: bool = True,
    ) -> FileObject:
        """Make a file of ``path``, whose bytes are reserved, and move it here.

        With an ``id`` that is known already, return the file that has it. Raises ``OSError``; unless the
        file ``must_last``, one whose record cannot be written is kept until the server stops.
        """
        id = id or self.new_id()
        if id in self._records:
            return self._records[id].file
        now = int(time.time())
        file = FileObject(
            id=id,
            bytes=path.stat().st_size,
            created_at=now,
            expires_at=now
            + min(lifetime or self._config.file_lifetime, self._config.file_lifetime),
            filename=filename,
            purpose=purpose,
        )
        record = FileRecord(owner, file)
        try:
            write_whole(self._record_path(id), record)
        except OSError as error:
            if must_last:
                raise
            log.error("the record of %s could not be written: %s", id, error)
        path.replace(self.content_path(file))
        self._records[id] = record
        return file

    def delete(self, owner: str, id: str) -> None:
        """Raises ``APIError``: 404, or 409 if a batch reads the file."""
        file = self.get(owner, id)
        if batches := self._uses.get(id):
            raise APIError(
                409,
                f"the file {id!r} is the input of {', '.join(sorted(batches))}, which has not ended: "
                "cancel the batch, or wait for it",
                param="file_id",
                code="file_in_use",
            )
        self._remove(file)

    def use(self, id: str, batch: str) -> None:
        """Keep a file until ``unuse``."""
        self._uses.setdefault(id, set()).add(batch)

    def unuse(self, id: str, batch: str) -> None:
        self._uses.get(id, set()).discard(batch)
        if not self._uses.get(id):
            self._uses.pop(id, None)

    @staticmethod
    def new_id() -> str:
        return f"file-{secrets.token_hex(12)}"

    # ----------------------------------------------------------------------------------

    def remove_expired(self) -> None:
        now = time.time()
        for file in [record.file for record in self._records.values()]:
            if file.expires_at is not None and file.expires_at <= now and file.id not in self._uses:
                self._remove(file)

    def _remove(self, file: FileObject) -> None:
        for path in (self._record_path(file.id), self.content_path(file)):
            path.unlink(missing_ok=True)
        del self._records[file.id]
        self.reserve(-file.bytes)

    def _record_path(self, id: str) -> Path:
        return self._folder.files / f"{id}.json"

    def _load(self) -> None:
        """Take in what an earlier server has left, and remove what it has not completed."""
        for path in self._folder.uploads.iterdir():
            path.unlink()
        records = list(self._read_records(self._folder.files.glob("*.json")))
        records.sort(key=lambda record: record.created_ns)
        self._records = {record.file.id: record for record in records}
        for path in self._folder.files.iterdir():
            if path.stem not in self._records:
                path.unlink()
        self.num_bytes = sum(record.file.bytes for record in records)
        self.num_bytes += sum(path.stat().st_size for path in self._folder.batches.glob("*.jsonl"))

    def _read_records(self, paths: Iterable[Path]) -> Iterable[FileRecord]:
        for path in paths:
            try:
                record = msgspec.json.decode(path.read_bytes(), type=FileRecord)
                size = os.path.getsize(self.content_path(record.file))
                if record.file.id == path.stem and size == record.file.bytes:
                    yield record
                    continue
                reason = "its content is not complete"
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                reason = str(error)
            log.warning("the file %s is dropped: %s", path.stem, reason)


def disk_error(error: OSError, what: str) -> APIError:
    """Return the answer for a write that failed."""
    log.error("%s: %s", what, error)
    return APIError(
        507, f"{what}: {error.strerror or 'the disk failed'}; nothing was kept", code="storage_full"
    )
