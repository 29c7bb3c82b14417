"""``/v1/files``: upload, list, describe, download and delete files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from treadle_server.batches.files import FileStore
from treadle_server.batches.pages import FileQuery, page_of, query_of
from treadle_server.batches.upload import receive_file
from treadle_server.batches.wire import DeletedFile, FileList, FileObject
from treadle_server.context import ServerContext
from treadle_server.openapi import CONFLICT, ERROR_RESPONSES, UPLOAD

__all__ = ("handlers",)

READ_BYTES = 2**18


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    def store() -> FileStore:
        return context.need_batches().files

    def file_of(request: Request[Any, Any, Any]) -> FileObject:
        return store().get(context.owner_of(request), str(request.path_params["file_id"]))

    @post(
        "/v1/files",
        status_code=200,
        responses={**ERROR_RESPONSES, **UPLOAD},
        request_max_body_size=None,
        summary="Upload a file",
        description="The body is a form (`multipart/form-data`) with the fields `purpose` (`batch`) and "
        "`file`, and if you like `expires_after[anchor]` (`created_at`) and `expires_after[seconds]`.",
    )
    async def upload_file(request: Request[Any, Any, Any]) -> FileObject:
        owner = context.owner_of(request)
        return await receive_file(store(), request, owner, context.config.max_file_bytes)

    @get(
        "/v1/files",
        responses=ERROR_RESPONSES,
        summary="List the files of this key",
        description="The query has `purpose`, `limit` (1 to 10,000), `order` (`asc`, `desc`) and `after` "
        "(the id of a file).",
    )
    async def list_files(request: Request[Any, Any, Any]) -> FileList:
        query = query_of(request, FileQuery)
        files = store().list(context.owner_of(request))
        if query.order == "desc":
            files.reverse()
        chosen = [file for file in files if query.purpose in (None, file.purpose)]
        return page_of(FileList, chosen, query.limit, query.after)

    @get("/v1/files/{file_id:str}", responses=ERROR_RESPONSES, summary="Describe a file")
    async def retrieve_file(request: Request[Any, Any, Any]) -> FileObject:
        return file_of(request)

    @get(
        "/v1/files/{file_id:str}/content",
        responses=ERROR_RESPONSES,
        summary="Return the content of a file",
    )
    async def file_content(request: Request[Any, Any, Any]) -> Stream:
        file = file_of(request)
        headers = {
            "content-length": str(file.bytes),
            "content-disposition": "attachment",
            "x-content-type-options": "nosniff",
        }
        path = store().content_path(file)
        return Stream(content(path), headers=headers, media_type="application/octet-stream")

    @delete(
        "/v1/files/{file_id:str}",
        status_code=200,
        responses={**ERROR_RESPONSES, **CONFLICT},
        summary="Delete a file",
    )
    async def delete_file(request: Request[Any, Any, Any]) -> DeletedFile:
        file = file_of(request)
        store().delete(context.owner_of(request), file.id)
        return DeletedFile(id=file.id)

    return [upload_file, list_files, retrieve_file, file_content, delete_file]


async def content(path: Path) -> AsyncGenerator[bytes, None]:
    """Yield the content of a file, even if it is deleted meanwhile."""
    with path.open("rb") as file:
        while data := await asyncio.to_thread(file.read, READ_BYTES):
            yield data
