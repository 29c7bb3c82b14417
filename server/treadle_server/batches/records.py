"""What is kept of each batch, one small file for each."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from treadle_server.batches.storage import write_whole
from treadle_server.batches.wire import Batch, Status
from treadle_server.errors import APIError

__all__ = ("ENDED", "BatchRecord", "BatchRecords")

log = logging.getLogger("treadle.server")

ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, the API key that it belongs to, and what its end needs to know.

    ``output_id`` and ``error_id`` are the ids that its files will have: a server that is stopped while it
    ends a batch gives them no others afterwards. ``ending`` is the status that follows ``finalizing``.
    ``created_ns`` orders the batches of one second.
    """

    owner: str
    batch: Batch
    output_id: str
    error_id: str
    output_lifetime: int | None = None
    ending: Status = "completed"
    created_ns: int = msgspec.field(default_factory=time.time_ns)

    @property
    def is_ended(self) -> bool:
        return self.batch.status in ENDED


class BatchRecords:
    """All batches of a server, the oldest first, in memory and in a folder."""

    def __init__(self, folder: Path, max_records: int) -> None:
        self._folder, self._max_records = folder, max_records
        self._records: dict[str, BatchRecord] = {}
        self._unsaved: dict[str, BatchRecord] = {}
        for record in sorted(self._read(), key=lambda record: record.created_ns):
            self._records[record.batch.id] = record

    def unfinished(self) -> list[BatchRecord]:
        return [record for record in self._records.values() if not record.is_ended]

    def of(self, owner: str) -> list[BatchRecord]:
        """Return the batches of ``owner``, the oldest first."""
        return [record for record in self._records.values() if record.owner == owner]

    def get(self, owner: str, id: str) -> BatchRecord:
        """Raises ``APIError`` (404)."""
        record = self._records.get(id)
        if record is None or record.owner != owner:
            raise APIError(
                404,
                f"there is no batch {id[:80]!r}: it was never created with this key, or has made room "
                "for others",
                param="batch_id",
                code="batch_not_found",
            )
        return record

    def add(self, record: BatchRecord) -> None:
        """Keep a new batch. The oldest that has ended makes room. Raises ``OSError``."""
        write_whole(self._path(record), record)
        self._records[record.batch.id] = record
        for old in list(self._records.values()):
            if len(self._records) <= self._max_records:
                break
            if old.is_ended:
                del self._records[old.batch.id]
                self._unsaved.pop(old.batch.id, None)
                self._path(old).unlink(missing_ok=True)

    def save(self, record: BatchRecord) -> None:
        """Write a change. What a full disk refuses is written again with the next change."""
        self._unsaved[record.batch.id] = record
        self.save_rest()

    def save_rest(self) -> None:
        """Write the changes that could not be written before."""
        for id, record in list(self._unsaved.items()):
            try:
                write_whole(self._path(record), record)
            except OSError as error:
                log.error("the state of %s could not be written: %s", id, error)
                break
            del self._unsaved[id]

    def journal_paths(self, record: BatchRecord) -> tuple[Path, Path]:
        """Return where the output and the errors of a batch are until it has ended."""
        id = record.batch.id
        return self._folder / f"{id}.output.jsonl", self._folder / f"{id}.errors.jsonl"

    def _path(self, record: BatchRecord) -> Path:
        return self._folder / f"{record.batch.id}.json"

    def _read(self) -> Iterator[BatchRecord]:
        for path in self._folder.glob("*.json"):
            with suppress(FileNotFoundError):
                try:
                    record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    log.warning("the batch %s is dropped: %s", path.stem, error)
                    continue
                if record.batch.id == path.stem:
                    yield record
