"""``treadle serve`` as a process of its own, always ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


class Process:
    """A running ``treadle serve``."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.client = httpx.Client(base_url=url, timeout=60)

    @property
    def children(self) -> list[int]:
        pid = self.process.pid
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in pids.split()]

    def metric(self, name: str) -> float:
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """The values of ``names`` at one moment."""
        page = self.client.get("/metrics").text
        matches = [re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.M) for name in names]
        if None in matches:
            raise AssertionError(f"no {names[matches.index(None)]} in\n{page}")
        return [float(match[1]) for match in matches if match]

    def settles(self, wait: float = 30.0) -> bool:
        """Whether the engine becomes idle, with every page free."""
        deadline = time.monotonic() + wait
        names = (
            "treadle_num_requests_running",
            "treadle_num_requests_waiting",
            "treadle_kv_cache_pages_used",
        )
        while any(self.metrics(*names)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, wait: float = 60.0) -> int:
        return self.process.wait(wait)


@contextmanager
def served(model: Path, log: Path, *options: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "treadle_cli", "serve", str(model), "--port", "0"]
    command += ["--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment
        )
    children: list[int] = []
    server: Process | None = None
    try:
        server = Process(process, address(process, log), log)
        children = server.children
        yield server
    finally:
        if server is not None:
            server.client.close()
        process.kill()
        process.wait(10)
        for child in children:
            if Path(f"/proc/{child}").exists() and "treadle" in cmdline(child):
                os.kill(child, signal.SIGKILL)


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def address(process: subprocess.Popen[str], log: Path, wait: float = 120.0) -> str:
    """The URL that the server prints once it listens."""
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        if match := re.search(r"^listening +(http\S+)$", log.read_text(), re.M):
            return match[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")
