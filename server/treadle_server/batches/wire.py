"""The files and batches of the API, and the lines of their files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from treadle_server.wire.common import CompletionTokensDetails, PromptTokensDetails

__all__ = (
    "MAX_LIFETIME",
    "Batch",
    "BatchCounts",
    "BatchError",
    "BatchErrors",
    "BatchLine",
    "BatchList",
    "BatchRequest",
    "BatchUsage",
    "DeletedFile",
    "FileList",
    "FileObject",
    "Lifetime",
    "LineFailure",
    "LineOutput",
    "LineResponse",
    "Purpose",
    "Status",
)

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
MIN_LIFETIME, MAX_LIFETIME = 3600, 30 * 24 * 3600


class Lifetime(msgspec.Struct, frozen=True, kw_only=True):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_LIFETIME, le=MAX_LIFETIME)]


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class FileList(msgspec.Struct, kw_only=True):
    """A part of a list. The next one begins ``after`` ``last_id``."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchRequest(msgspec.Struct, kw_only=True):
    """A request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: Lifetime | None = None


class BatchError(msgspec.Struct, kw_only=True):
    """Why a batch failed. ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class BatchCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct, kw_only=True):
    input_tokens: int = 0
    input_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    output_tokens: int = 0
    output_tokens_details: CompletionTokensDetails = msgspec.field(
        default_factory=CompletionTokensDetails
    )
    total_tokens: int = 0


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    model: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = msgspec.field(default_factory=BatchCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    """A part of a list. The next one begins ``after`` ``last_id``."""

    object: str = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request of an input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer. ``ignored_fields`` is what the header ``x-ignored-fields`` would say."""

    status_code: int
    request_id: str
    body: Any
    ignored_fields: str | None = None


class LineFailure(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why there is no response. With ``line``, that line of the input is no request."""

    code: str
    message: str
    line: int | None = None


class LineOutput(msgspec.Struct, kw_only=True):
    """One line of an output or error file."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: LineFailure | None = None
