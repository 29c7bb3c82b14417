"""A pytest plugin with the fixture ``serve``: a server as users start it, with the demo model.

::

    pytest_plugins = ["treadle.testing.served"]


    @pytest.fixture(scope="module")
    def server(serve):
        return serve("--tool-call-parser", "mine")


    def test_a_chat(server):
        answer = server.chat("Hello", max_tokens=4)
        assert answer["choices"][0]["finish_reason"] == "length"

Installed plugins are found as always; a file is named with ``--plugin-file``. The server is a
process of its own, and a plugin that keeps it from ending fails the test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

from treadle.known_plugins import install_hint
from treadle.processes.spawn import exit_reason

__all__ = ("RunningServer", "ServedAnswer", "serve")

MODEL = "demo:treadle-demo"
START_SECONDS = 120.0
END_SECONDS = 30.0
SMALL = ("--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--num-pages", "256")


@dataclass(frozen=True)
class ServedAnswer:
    """A response: the names of ``headers`` are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Raises ``msgspec.DecodeError``."""
        return msgspec.json.decode(self.body)


class RunningServer:
    """``treadle serve`` in a process of its own. Raises ``RuntimeError`` if it does not start."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "treadle_cli", "serve", MODEL, "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *SMALL, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._lines: list[str] = []
        self._begun = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._begun.wait(START_SECONDS) or not self.url:
            self.kill()
            reason = exit_reason(self.process.wait())
            raise RuntimeError(f"the server did not start ({reason}):\n{self.log}")

    @property
    def log(self) -> str:
        """What it has printed."""
        return "".join(self._lines)

    def ask(self, path: str, body: object = None, *, seconds: float = 60.0) -> ServedAnswer:
        """Send a POST with ``body`` as JSON, or a GET without one; return the whole answer."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            response = urllib.request.urlopen(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            fields = {name.lower(): value for name, value in response.headers.items()}
            return ServedAnswer(response.status, fields, response.read())

    def chat(self, text: str, **fields: Any) -> Any:
        """Return the JSON of the answer to one message of a user."""
        messages = [{"role": "user", "content": text}]
        return self.ask("/v1/chat/completions", {"messages": messages, **fields}).json

    def close(self) -> None:
        """Ask the server to end. Raises ``RuntimeError`` if it does not, or fails meanwhile."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the server did not end in {END_SECONDS:g} s:\n{self.log}"
            ) from None
        finally:
            self.kill()
        if status:
            raise RuntimeError(f"the server {exit_reason(status)}:\n{self.log}")

    def kill(self) -> None:
        """End the server and its children at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(END_SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self._lines.append(line)
                if line.startswith("listening") and not self.url:
                    self.url = line.split()[1]
                    self._begun.set()
        self._begun.set()


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., RunningServer]]:
    """Start servers with options of ``treadle serve``; the end of the module ends them."""
    for package in ("treadle_cli", "treadle_server", "treadle_demo"):
        if find_spec(package) is None:
            pytest.fail(f"the fixture serve needs {install_hint(package.replace('_', '-'))}")
    servers: list[RunningServer] = []

    def start(*options: str) -> RunningServer:
        servers.append(RunningServer(*options))
        return servers[-1]

    try:
        yield start
        for server in servers:
            server.close()
    finally:
        for server in servers:
            server.kill()
