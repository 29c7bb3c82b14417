"""``treadle serve`` with one process for each rank: an answer, and what is left when a rank dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from process import Process, cmdline, served

pytestmark = pytest.mark.own_python

OPTIONS = (
    "--distributed-executor-backend",
    "mp",
    "--tensor-parallel-size",
    "2",
    "--num-pages",
    "64",
)
LONG: Any = {"model": "tiny", "prompt": "ab", "max_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from treadle.testing.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    sizes: dict[str, Any] = {"max_position_embeddings": 512, "num_hidden_layers": 8}
    return make_checkpoint(folder, "Qwen3ForCausalLM", tokenizer=True, **sizes)


@contextmanager
def two_ranks(model: Path, log: Path) -> Iterator[tuple[Process, openai.OpenAI]]:
    with (
        served(model, log, "--served-model-name", "tiny", *OPTIONS) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        below = descendants(server.process.pid)
        try:
            yield server, client
        finally:
            for pid in filter(running, below):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    pids: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            pids |= {int(child)} | descendants(int(child))
    return pids


def workers(pid: int) -> list[int]:
    """The processes of the ranks; the one of rank 0 was started first."""
    return sorted(p for p in descendants(pid) if "treadle_executor_mp" in cmdline(p))


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class Health(threading.Thread):
    """Asks ``/health`` all the time; ``seen`` has each new status with its time."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.statuses: list[tuple[float, int]] = []
        self._client = httpx.Client(base_url=url, timeout=5)

    def run(self) -> None:
        with self._client:
            while not self.statuses or self.statuses[-1][1]:
                try:
                    status = self._client.get("/health").status_code
                except httpx.TransportError:
                    status = 0  # the server is gone
                if not self.statuses or status != self.statuses[-1][1]:
                    self.statuses.append((time.monotonic(), status))
                time.sleep(0.005)


def test_answers_are_those_of_one_process(model: Path, tmp_path: Path) -> None:
    request: Any = {"model": "tiny", "prompt": "hello", "max_tokens": 24, "temperature": 0}
    texts = []
    with two_ranks(model, tmp_path / "log") as (server, client):
        assert len(workers(server.process.pid)) == 2
        texts.append(client.completions.create(**request).choices[0].text)
        below = descendants(server.process.pid)
        server.signal(signal.SIGTERM)
        assert server.ends() == 0
        assert not list(filter(running, below))
    with (
        served(model, tmp_path / "one", "--served-model-name", "tiny") as single,
        openai.OpenAI(base_url=f"{single.url}/v1", api_key="-", max_retries=0) as client,
    ):
        texts.append(client.completions.create(**request).choices[0].text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_worker_is_told_and_ends_everything(
    model: Path, tmp_path: Path, rank: int
) -> None:
    with two_ranks(model, tmp_path / "log") as (server, client):
        below = descendants(server.process.pid)
        stream = iter(client.completions.create(stream=True, **LONG))
        next(stream)
        health = Health(server.url)
        health.start()
        while not health.statuses:
            time.sleep(0.005)
        os.kill(workers(server.process.pid)[rank], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(openai.APIError, match="the engine has stopped") as exc_info:
            list(stream)
        assert exc_info.value.code == "engine_dead"
        assert server.ends() not in (0, None)
        health.join(5)
        statuses = [status for _, status in health.statuses]
        assert statuses in ([200, 503, 0], [200, 0])  # the server may end between two questions
        assert health.statuses[1][0] - killed < 20
        assert not list(filter(running, below))
    assert f"rank {rank} is gone (exit code -9)" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_worker_killed_while_nobody_asks(model: Path, tmp_path: Path) -> None:
    """The heartbeat of the server must not keep the engine from looking after its workers."""
    with two_ranks(model, tmp_path / "log") as (server, _):
        below = descendants(server.process.pid)
        time.sleep(1.5)  # the heartbeat has begun
        os.kill(workers(server.process.pid)[1], signal.SIGKILL)
        assert server.ends(20) not in (0, None)
        assert not list(filter(running, below))
    assert "rank 1 is gone" in (tmp_path / "log").read_text()
