"""A hub on this machine: repositories with commits, and a log of what was asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

__all__ = ("FakeHub", "fake_hub")


class FakeHub:
    """``commits`` of one repository by their hash; ``branches`` may be moved at any time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.commits: dict[str, Mapping[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.paths: list[str] = []
        self.tokens: list[str | None] = []
        self.url = ""
        self.storage_url: str | None = None
        """Another server, to which this one redirects for the files."""

    def commit(self, branch: str, files: Mapping[str, bytes]) -> str:
        """Add a commit and move ``branch`` to it."""
        digest = hashlib.sha1(repr((self.branches, sorted(files.items()))).encode()).hexdigest()
        self.commits[digest] = files
        self.branches[branch] = digest
        return digest

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for one path."""
        self.paths.append(path)
        match path.removeprefix("/").split("/"):
            case ["api", "models", org, name, kind, revision] if f"{org}/{name}" == self.name:
                commit = self.branches.get(revision, revision)
                if commit not in self.commits:
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
                files = self.commits[commit]
                if kind == "tree":
                    entries = [
                        {"type": "file", "path": n, "size": len(d), "oid": blob_id(d)}
                        for n, d in files.items()
                    ]
                    return 200, {"X-Repo-Commit": commit}, json.dumps(entries).encode()
                info = {
                    "id": self.name,
                    "sha": commit,
                    "siblings": [{"rfilename": n} for n in files],
                }
                return 200, {}, json.dumps(info).encode()
            case [org, name, "resolve", revision, *rest] if f"{org}/{name}" == self.name:
                commit = self.branches.get(revision, revision)
                data = self.commits.get(commit, {}).get("/".join(rest))
                if data is None:
                    return 404, {"X-Error-Code": "EntryNotFound"}, b""
                headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(data)}"'}
                if self.storage_url is not None:
                    headers |= {"Location": self.storage_url + path}
                    return 302, headers | {"X-Linked-Size": str(len(data))}, b""
                return 200, headers, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def blob_id(data: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def fake_hub(name: str) -> Iterator[FakeHub]:
    """Serve an empty repository on a free port."""
    hub = FakeHub(name)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.tokens.append(self.headers["authorization"])
            status, headers, body = hub.answer(unquote(urlsplit(self.path).path))
            self.send_response(status)
            for header, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing: the paths are kept by the hub."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
