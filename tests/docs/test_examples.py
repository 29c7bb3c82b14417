"""Every example of the README and of the documentation is executed.

The blocks of a page run in order, in a folder of their own, as a reader would run them: Python
blocks share one namespace, ``<!-- example: file: NAME -->`` before a block makes it a file,
``<!-- example: output -->`` is what the block before must have printed, ``<!-- example: fails -->``
marks commands that must fail and ``<!-- example: error -->`` a part of what they say. ``treadle`` and
``curl`` commands run in a shell, and ``treadle serve`` keeps running until the page ends. ``treadle``
begins with torch imported: see ``tests/preloaded.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import Block, blocks

from treadle.plugins.local import local_entries

pytestmark = pytest.mark.early

RUN = ("treadle", "curl", "echo")
# Commands about the repository itself; tests/docs/test_pages.py compares them with .ci/run.
NOT_RUN = (
    "pip",
    "git",
    "cd",
    "source",
    "python3",
    "pytest",
    "pre-commit",
    "ruff",
    "mypy",
    "zensical",
    "./test",
    ".ci/run",
)
SERVER = "localhost:8000"
PATIENCE = 120.0
SCRIPTS = Path(sys.executable).parent


class Reader:
    """Follows one page in one folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, commands: Path) -> None:
        self.folder = folder
        self.patch = patch
        self.commands = commands
        self.namespace: dict[str, object] = {"__name__": "__main__"}
        self.printed = ""
        self.servers: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        path = os.pathsep.join((str(commands), str(SCRIPTS), os.environ["PATH"]))
        self.environment = {**os.environ, "PATH": path}

    def follow(self, block: Block) -> None:
        code = block.code.replace(SERVER, f"localhost:{self.port}")
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        elif block.note == "output":
            assert self.printed.strip() == code.strip()
        elif block.note == "error":
            assert code.strip() in self.printed
        elif block.language == "python":
            printed = io.StringIO()
            # Line numbers of a traceback are those of the page.
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (block.line - 1) + code, block.page, "exec"), self.namespace)  # noqa: S102
            self.printed = printed.getvalue()
        elif block.language == "bash":
            for command in (part for line in block.commands for part in line.split(" && ")):
                self.run(command.replace(SERVER, f"localhost:{self.port}"), block.note == "fails")
        elif block.language == "json":
            json.loads(code)
        elif block.language == "toml":
            tomllib.loads(code)

    def run(self, command: str, fails: bool = False) -> None:
        program = next(word for word in shlex.split(command) if "=" not in word)
        if shlex.split(command)[:3] == ["pip", "install", "./" + command.split("/")[-1]]:
            self.install(self.folder / command.split("/")[-1])
            return
        words = shlex.split(command)
        is_local_script = program == "python" and (self.folder / words[1]).is_file()
        if program in NOT_RUN or (program == "python" and not is_local_script):
            return
        assert is_local_script or program in RUN, f"the reader does not know how to run {command!r}"
        if words[:2] == ["treadle", "serve"] and "--explain" not in words and not fails:
            self.serve(command)
            return
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert bool(process.returncode) == fails, f"{command}\n{process.stdout}\n{process.stderr}"
        self.printed = process.stderr if fails else process.stdout

    def install(self, project: Path) -> None:
        """Install what the page has written, beside the environment of the tests."""
        site = self.folder / "site"
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
        command = [sys.executable, "-m", "pip", "install", *options, str(project)]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
        self.environment["PYTHONPATH"] = str(site)
        self.patch.syspath_prepend(site)

    def serve(self, command: str) -> None:
        program, *arguments = shlex.split(command)
        arguments = [str(self.commands / program), *arguments, "--port", str(self.port)]
        with (self.folder / "server.log").open("wb") as log:
            server = subprocess.Popen(
                arguments, cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self.servers.append(server)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and server.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://localhost:{self.port}/health", timeout=2),
            ):
                return
            time.sleep(0.1)
        pytest.fail(f"{command} did not start\n{(self.folder / 'server.log').read_text()}")

    def close(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@pytest.fixture(scope="session")
def commands(preloaded: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``treadle`` that need not import torch each time."""
    folder = tmp_path_factory.mktemp("commands")
    command = folder / "treadle"
    # A small cache: by default each engine clears a gigabyte.
    small = 'case "$1" in generate|serve) set -- "$@" --num-pages 256;; esac'
    command.write_text(f'#!/bin/sh\n{small}\nexec {shlex.join(preloaded)} -m treadle_cli "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Path) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, monkeypatch, commands)
    yield reader
    reader.close()


def test_the_examples_of_the_page_work(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        if not block.skipped:
            reader.follow(block)
    for block in blocks(page):
        if block.file is not None and "\nTREADLE = {" in block.code:
            for entry in local_entries(block.file):
                command = f"treadle plugin test {entry.id} --plugin-file {block.file}"
                reader.run(command, block.broken)


def test_an_example_that_is_not_run_says_why(page: Path) -> None:
    silent = [b.line for b in blocks(page) if b.skipped and len(b.note.split()) < 4]
    assert silent == []
