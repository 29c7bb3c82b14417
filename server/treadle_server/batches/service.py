"""The batches of a server: created by requests, run one after another, ended in any case.

::

    validating ──> in_progress ──> finalizing ──> completed
        │              ├─ cancelling ─> finalizing ──> cancelled
        │              └─ its time is over ─> finalizing ──> expired
        └──> failed    (so does in_progress if the disk is full)

A server that stops, or is killed, leaves a batch in its state. The next one with the same folder continues
it: what the journal has is answered.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import time
from contextlib import aclosing

from treadle.errors import EngineDeadError
from treadle_server.batches.endpoints import ENDPOINTS, BatchClient, LineExecutor
from treadle_server.batches.files import FileStore, StorageFullError
from treadle_server.batches.journal import Journal, JournalError
from treadle_server.batches.lines import LineError
from treadle_server.batches.records import BatchRecord, BatchRecords
from treadle_server.batches.runner import BatchInput, answer_rest, run_lines
from treadle_server.batches.slots import LineSlots
from treadle_server.batches.storage import Folder
from treadle_server.batches.wire import (
    Batch,
    BatchCounts,
    BatchError,
    BatchErrors,
    BatchRequest,
    Status,
)
from treadle_server.context import ServerContext
from treadle_server.errors import APIError

__all__ = ("BatchService", "check_endpoint")

log = logging.getLogger("treadle.server")

MAX_ERRORS = 100
"""Wrong lines that a batch that fails lists."""
MAX_UNFINISHED = 100
"""Batches that wait or run."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
ENDINGS: dict[Status, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "the request was not run before the completion window of the batch was over",
    ),
    "cancelled": ("batch_cancelled", "the batch was cancelled before the request was complete"),
}
"""The error of a request that was not run, by the status of its batch."""


class BatchFailedError(Exception):
    """The batch fails as a whole."""

    def __init__(self, *errors: BatchError) -> None:
        super().__init__(errors[0].message)
        self.errors = list(errors)


class BatchService:
    """Creates and runs batches. One for each server, on its event loop."""

    def __init__(self, context: ServerContext, folder: Folder) -> None:
        config = context.config
        self._context, self._config = context, config
        self._folder = folder
        self.files = FileStore(folder, config)
        self.records = BatchRecords(folder.batches, config.max_files)
        limits = context.engine.config.scheduler
        self._max_lines = config.max_batch_concurrency or max(1, limits.max_num_seqs * 3 // 4)
        self._slots = LineSlots(context.active_requests, self._max_lines, limits.max_num_seqs)
        self._turns = asyncio.Semaphore(config.max_running_batches)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._works: dict[str, asyncio.Task[None]] = {}

    # -- life --------------------------------------------------------------------------

    def start(self) -> None:
        """Continue the batches that an earlier server has left."""
        for record in self.records.unfinished():
            log.info("continuing %s, which is %s", record.batch.id, record.batch.status)
            self._begin(record)

    async def stop(self) -> None:
        """End what runs, without a change of its state. May be called twice."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        self.records.save_rest()
        self._folder.close()

    # -- requests ----------------------------------------------------------------------

    def create(self, owner: str, request: BatchRequest) -> Batch:
        """Begin a batch whose request has been checked. Raises ``APIError`` and ``OSError``."""
        file = self.files.get(owner, request.input_file_id)
        if file.purpose != "batch":
            raise APIError(
                400,
                f"the file {file.id!r} has the purpose {file.purpose!r}; a batch needs one that was "
                "uploaded with the purpose 'batch'",
                param="input_file_id",
            )
        unfinished = len(self.records.unfinished())
        if unfinished >= MAX_UNFINISHED:
            raise APIError(
                429,
                f"{unfinished} batches wait or run; at most {MAX_UNFINISHED} may: try again later",
                code="too_many_batches",
                headers={"retry-after": "60"},
            )
        self.files.check_room(2 * (unfinished + 1))  # their outputs and errors
        now, lifetime = int(time.time()), request.output_expires_after
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=request.endpoint,
            model=self._context.model,
            input_file_id=file.id,
            completion_window=request.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + int(self._config.batch_timeout),
            metadata=request.metadata,
        )
        record = BatchRecord(
            owner=owner,
            batch=batch,
            output_id=self.files.new_id(),
            error_id=self.files.new_id(),
            output_lifetime=None if lifetime is None else lifetime.seconds,
        )
        self.records.add(record)
        self._begin(record)
        return batch

    def cancel(self, owner: str, id: str) -> Batch:
        """Stop a batch, which keeps the answers that it has. Raises ``APIError``: 404, 409."""
        record = self.records.get(owner, id)
        batch = record.batch
        if record.is_ended or batch.status == "finalizing":
            raise APIError(
                409,
                f"the batch {id!r} is {batch.status} and cannot be cancelled",
                param="batch_id",
                code="batch_ended",
            )
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            self.records.save(record)
            self._works[id].cancel()
        return batch

    # -- one batch ---------------------------------------------------------------------

    def _begin(self, record: BatchRecord) -> None:
        batch = record.batch
        self.files.use(batch.input_file_id, batch.id)
        if batch.status in ("validating", "in_progress"):
            self._works[batch.id] = asyncio.create_task(self._work(record))
        self._tasks[batch.id] = task = asyncio.create_task(self._process(record))
        task.add_done_callback(lambda task: self._forget(record, task))

    def _forget(self, record: BatchRecord, task: asyncio.Task[None]) -> None:
        id = record.batch.id
        self._tasks.pop(id, None)
        self._works.pop(id, None)
        self.files.unuse(record.batch.input_file_id, id)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s was left: %s", id, error, exc_info=error)

    async def _process(self, record: BatchRecord) -> None:
        """Run a batch to its end, whatever that is. Cancelled, it leaves the state as it is."""
        batch, work = record.batch, self._works.get(record.batch.id)
        if work is not None:
            try:
                await asyncio.wait((work,), timeout=max(0.0, batch.expires_at - time.time()))
                is_expired = not work.done()
            finally:
                work.cancel()
                await asyncio.wait((work,))
            if is_expired:
                record.ending = "expired"
            elif not work.cancelled() and (error := work.exception()) is not None:
                if isinstance(error, EngineDeadError):
                    return  # the next server continues
                record.ending = "failed"
                batch.errors = BatchErrors(data=errors_of(error))
        if batch.status == "cancelling":
            record.ending = "cancelled"
        await self._finalize(record)

    async def _work(self, record: BatchRecord) -> None:
        """Check the lines of a batch and run them. Raises what makes it fail."""
        batch = record.batch
        async with self._turns:
            source = self._source(record)
            if batch.status == "validating":
                batch.request_counts = BatchCounts(total=await self._validate(source))
                batch.status, batch.in_progress_at = "in_progress", int(time.time())
                self.records.save(record)
            journal = await self._open_journal(record)
            client = BatchClient(name=record.owner or "batch", owner=record.owner)
            try:
                executor = LineExecutor(self._context, client, self._slots)
                await run_lines(source, executor, journal, self._max_lines)
            finally:
                await journal.close()

    async def _validate(self, source: BatchInput) -> int:
        """Return the number of requests. Raises ``BatchFailedError`` with all that is wrong."""
        errors: list[BatchError] = []
        count = 0
        async with aclosing(source.lines()) as lines:
            async for line, request in lines:
                count += 1
                if isinstance(request, LineError) and len(errors) < MAX_ERRORS:
                    errors.append(
                        BatchError(
                            code=request.code,
                            message=str(request),
                            param=request.param,
                            line=line.number,
                        )
                    )
                if count > self._config.max_batch_requests:
                    text = (
                        f"the file has more than {self._config.max_batch_requests} requests "
                        "(--max-batch-requests): split it"
                    )
                    raise BatchFailedError(BatchError(code="too_many_requests", message=text))
        if not count:
            text = "the file has no request; it needs one JSON object on each line"
            errors.append(BatchError(code="empty_file", message=text))
        if errors:
            raise BatchFailedError(*errors)
        return count

    async def _finalize(self, record: BatchRecord) -> None:
        """Turn the journal into files, and set the final status."""
        batch = record.batch
        if batch.in_progress_at is not None:
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
            self.records.save(record)
            try:
                await self._keep_output(record)
            except (OSError, StorageFullError, JournalError, APIError) as error:
                record.ending = "failed"
                batch.errors = BatchErrors(data=errors_of(error))
        batch.status = record.ending
        setattr(batch, f"{batch.status}_at", int(time.time()))
        self.records.save(record)
        log.info(
            "%s is %s: %d of %d requests completed, %d failed",
            batch.id,
            batch.status,
            batch.request_counts.completed,
            batch.request_counts.total,
            batch.request_counts.failed,
        )

    async def _keep_output(self, record: BatchRecord) -> None:
        batch = record.batch
        journal = await self._open_journal(record)
        try:
            if record.ending in ENDINGS:
                await answer_rest(self._source(record), journal, *ENDINGS[record.ending])
        finally:
            await journal.close()
        ids = (record.output_id, record.error_id)
        for path, id in zip(self.records.journal_paths(record), ids, strict=True):
            if path.exists() and not path.stat().st_size:
                path.unlink()
            if path.exists() or id in self.files:
                self.files.adopt(
                    path,
                    record.owner,
                    id=id,
                    filename=f"{path.stem.replace('.', '_')}.jsonl",
                    purpose="batch_output",
                    lifetime=record.output_lifetime,
                    must_last=record.ending != "failed",
                )
        batch.output_file_id, batch.error_file_id = (id if id in self.files else None for id in ids)

    async def _open_journal(self, record: BatchRecord) -> Journal:
        """Return the journal of a batch, whose counts are those of the batch from now on."""
        journal = Journal(*self.records.journal_paths(record), reserve=self.files.reserve)
        journal.counts.total = record.batch.request_counts.total
        await journal.open()
        record.batch.request_counts, record.batch.usage = journal.counts, journal.usage
        return journal

    def _source(self, record: BatchRecord) -> BatchInput:
        file = self.files.get(record.owner, record.batch.input_file_id)
        return BatchInput(
            path=self.files.content_path(file),
            endpoints=(record.batch.endpoint,),
            max_line_bytes=self._config.max_body_bytes,
        )


def check_endpoint(endpoint: str) -> None:
    """Raise ``APIError`` unless lines of that endpoint can be run."""
    if endpoint not in ENDPOINTS:
        raise APIError(
            400,
            f"endpoint is {endpoint[:80]!r}; it must be one of {', '.join(ENDPOINTS)}",
            param="endpoint",
        )


def errors_of(error: BaseException) -> list[BatchError]:
    """Return what a batch says about its failure."""
    match error:
        case BatchFailedError():
            return error.errors
        case StorageFullError():
            return [BatchError(code="storage_full", message=str(error))]
        case OSError():
            log.error("the files of a batch could not be read or written: %s", error)
            text = f"the files of the batch could not be read or written: {error.strerror}"
            code = "storage_full" if error.errno in FULL else "storage_failed"
            return [BatchError(code=code, message=text)]
        case APIError():
            return [BatchError(code=error.detail.code or "server_error", message=str(error))]
        case _:
            log.error("a batch failed unexpectedly", exc_info=error)
            text = "the server failed on this batch; its log has the details"
            return [BatchError(code="internal_error", message=text)]
