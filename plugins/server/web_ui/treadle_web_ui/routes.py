"""The files of the page. They are the same for everybody and hold no data, so they need no API key."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

__all__ = ("handlers",)

MEDIA_TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
HEADERS = {
    # What a model writes may be anything, so nothing in it can run, load or send.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class StaticFile(NamedTuple):
    path: str
    media_type: str
    content: bytes
    etag: str


def static_files() -> Iterator[StaticFile]:
    for file in files("treadle_web_ui").joinpath("static").iterdir():
        media_type = MEDIA_TYPES[file.name.rpartition(".")[2]]
        content = file.read_bytes()
        path = "/ui" if file.name == "index.html" else f"/ui/{file.name}"
        yield StaticFile(path, media_type, content, f'"{sha256(content).hexdigest()[:32]}"')


def handlers() -> list[HTTPRouteHandler]:
    return [_handler(file) for file in static_files()]


def _handler(file: StaticFile) -> HTTPRouteHandler:
    @get(file.path, opt={"public": True}, include_in_schema=False)
    async def answer(request: Request[Any, Any, Any]) -> Response[bytes]:
        headers = {**HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(b"", status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return answer
