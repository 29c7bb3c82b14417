"""Lists in pages: which part of a list a request asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from litestar import Request

from treadle.errors import RequestError
from treadle_server.batches.wire import Batch, BatchList, FileList, FileObject

__all__ = ("BatchQuery", "FileQuery", "page_of", "query_of")


T = TypeVar("T", FileObject, Batch)
P = TypeVar("P", FileList, BatchList)
Q = TypeVar("Q", bound="FileQuery | BatchQuery")


class FileQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list of files."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    purpose: str | None = None


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query of a list of batches."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    after: str | None = None


def query_of(request: Request[Any, Any, Any], kind: type[Q]) -> Q:
    """Raises ``RequestError`` that names a wrong parameter."""
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise RequestError(f"{name}: {message}", param=name or None) from None


def page_of(kind: type[P], objects: Sequence[T], limit: int, after: str | None) -> P:
    """Return the objects that follow the one with the id ``after``. Raises ``RequestError``."""
    if after is not None:
        ids = [item.id for item in objects]
        if after not in ids:
            raise RequestError(f"after is {after[:80]!r}, which is not in this list", param="after")
        objects = objects[ids.index(after) + 1 :]
    data: list[Any] = list(objects[:limit])
    return kind(
        data=data,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
        has_more=len(objects) > limit,
    )
