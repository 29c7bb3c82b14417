"""Faults from outside of a real server: what it must be like afterwards is the same for all.

``fault_seed`` moves the moment of each fault. After it the tokens of a canary are those from before,
nothing is running, waiting or holding pages, and ``/health`` is right. ``faults.toml`` names the rows.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))
from process import Process, served

pytestmark = [
    pytest.mark.own_python,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of another process"),
]

CANARY = [7, 20, 33, 46]
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
OPTIONS = ("--num-pages", "96", "--max-num-seqs", "8", "--hang-timeout", "1")


def body(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": tokens, **fields, **more}


def tokens(server: Process, prompt: list[int], count: int = 16) -> list[int]:
    answer = server.client.post("/v1/completions", json=body(prompt, count))
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    assert len(ids) == count
    return ids


def engine_pid(server: Process) -> int:
    (pid,) = [c for c in server.children if "torch" in Path(f"/proc/{c}/maps").read_text()]
    return pid


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from treadle.testing.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    return make_checkpoint(folder, tokenizer=True, max_position_embeddings=512)


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("shared")
    copy = folder / "model"
    shutil.copytree(model, copy)
    with served(copy, folder / "log", *OPTIONS) as process:
        yield process
        process.signal(signal.SIGTERM)
        assert process.ends() == 0


@pytest.fixture(scope="module")
def reference(shared: Process) -> list[int]:
    return tokens(shared, CANARY)


@pytest.fixture
def server(shared: Process, reference: list[int]) -> Iterator[Process]:
    """The server, which must be as before when the test is over."""
    yield shared
    assert shared.settles(), "requests or pages are left"
    assert tokens(shared, CANARY) == reference
    assert shared.client.get("/health").status_code == 200
    assert shared.metric("treadle_integrity_faults_total") == 0


@contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def connect(server: Process) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_clients_leave_at_any_byte(server: Process, fault_seed: int) -> None:
    draw = random.Random(fault_seed)
    for _ in range(12):
        content = b'{"prompt":[5,6],"n":2,"ignore_eos":true,"max_tokens":200,"stream":%s}'
        content %= draw.choice((b"true", b"false"))
        request = HEAD + b"content-length: %d\r\n\r\n" % len(content) + content
        with connect(server) as connection:
            if draw.random() < 0.5:
                connection.sendall(request[: draw.randrange(1, len(request))])
            else:
                connection.sendall(request)
                if b"true" in content:
                    connection.recv(draw.randrange(1, 400))
            if draw.random() < 0.5:  # no more from here, but we would still read
                connection.shutdown(socket.SHUT_WR)


def test_an_engine_that_is_stopped_is_reported_and_goes_on(
    server: Process, reference: list[int], fault_seed: int
) -> None:
    draw, pid = random.Random(fault_seed), engine_pid(server)
    expected = tokens(server, CANARY, 64)
    ids: list[int] = []
    with server.client.stream(
        "POST", "/v1/completions", json=body(CANARY, 64, stream=True)
    ) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        for _ in range(draw.randrange(1, 20)):
            ids += _chunk_ids(next(lines))
        os.kill(pid, signal.SIGSTOP)
        try:
            while server.client.get("/health").status_code == 200:
                pass
        finally:
            os.kill(pid, signal.SIGCONT)
        for line in lines:
            ids += _chunk_ids(line)
    assert ids == expected
    while server.client.get("/health").status_code != 200:
        pass


def _chunk_ids(line: str) -> list[int]:
    choices = httpx.Response(200, content=line.removeprefix("data: ")).json()["choices"]
    return [token for choice in choices for token in choice.get("token_ids") or []]


def test_a_client_id_is_only_a_label(server: Process, fault_seed: int) -> None:
    """Many requests of one id, of which one leaves: the others are answered."""
    draw = random.Random(fault_seed)
    headers = {"x-request-id": "same"}
    expected = tokens(server, CANARY, 48)

    def ask(leaves_after: int | None) -> list[int]:
        ids: list[int] = []
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json=body(CANARY, 48, stream=True),
            headers=headers,
            timeout=30,
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    ids += _chunk_ids(line)
                if leaves_after is not None and len(ids) > leaves_after:
                    break
        return ids

    leaves = [draw.randrange(40), *[None] * 5]
    draw.shuffle(leaves)
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, leaves))
    for left, ids in zip(leaves, answers, strict=True):
        assert ids == expected[: len(ids)] and (left is not None or len(ids) == 48)


def test_no_file_descriptors_are_left(server: Process, fault_seed: int) -> None:
    """A connection that is open is served meanwhile, and a new one once there is room again."""
    pid = server.process.pid
    server.client.get("/health")
    used = len(os.listdir(f"/proc/{pid}/fd"))
    more = random.Random(fault_seed).randrange(3, 12)
    with limited(pid, resource.RLIMIT_NOFILE, used + more):
        crowd = [connect(server) for _ in range(more + 20)]
        assert server.client.get("/ready").status_code == 200
        assert len(tokens(server, CANARY)) == 16
        for connection in crowd:
            connection.close()
        with httpx.Client(base_url=server.url, timeout=20) as new:
            assert new.get("/health").status_code == 200


def test_weights_that_shrink_under_the_server(
    server: Process, reference: list[int], fault_seed: int
) -> None:
    """They were copied: a file that is downloaded again does not end the process with SIGBUS."""
    command = Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
    (file,) = Path(command[4]).glob("*.safetensors")
    os.truncate(file, random.Random(fault_seed).randrange(0, file.stat().st_size + 1))
    assert tokens(server, CANARY) == reference


def test_answers_are_those_of_their_own_prompts(server: Process, fault_seed: int) -> None:
    """More sequences than pages hold: each answer is that of its prompt alone."""
    draw = random.Random(fault_seed)
    prompts = [[draw.randrange(5, 60) for _ in range(draw.randrange(1, 150))] for _ in range(16)]
    alone = [tokens(server, prompt, 96) for prompt in prompts]
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(lambda prompt: tokens(server, prompt, 96), prompts))
    assert together == alone


def test_the_log_cannot_be_written(server: Process, fault_seed: int) -> None:
    """The disk is full for all processes: what would be logged is lost, and nothing else."""
    draw, size = random.Random(fault_seed), server.log.stat().st_size
    pids = [server.process.pid, *server.children]
    with (
        limited(pids[0], resource.RLIMIT_FSIZE, size),
        limited(pids[1], resource.RLIMIT_FSIZE, size),
    ):
        for _ in range(8):
            bad = {**body(CANARY, 4), draw.choice(("temperature", "top_p", "n")): -draw.random()}
            assert server.client.post("/v1/completions", json=bad).status_code == 400
            assert len(tokens(server, CANARY, 4)) == 4
        assert server.client.get("/health").status_code == 200
    assert server.log.stat().st_size <= size


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["idle", "prompt", "output", "queue"])
def test_a_killed_engine_ends_the_server_with_an_error(
    model: Path, tmp_path: Path, moment: str, fault_seed: int
) -> None:
    draw = random.Random(fault_seed)
    sizes = {"idle": 0, "prompt": 1, "output": 1, "queue": 24}
    with served(model, tmp_path / "log", *OPTIONS) as server:
        pid = engine_pid(server)
        prompt = [5] * (300 if moment == "prompt" else 3)

        def ask(_: int) -> str:
            with httpx.stream(
                "POST",
                f"{server.url}/v1/completions",
                json=body(prompt, 200, stream=True),
                timeout=30,
            ) as response:
                return "".join(response.iter_text())

        with ThreadPoolExecutor(24) as threads:
            answers = [threads.submit(ask, i) for i in range(sizes[moment])]
            after = draw.randrange(1, 60) if moment in ("output", "queue") else 0
            while sizes[moment] and server.metric("treadle_generation_tokens_total") < after:
                pass
            os.kill(pid, draw.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)))
            texts = [answer.result() for answer in answers]
        for text in texts:  # each has been told, or was complete before
            assert "engine_dead" in text or '"finish_reason":"length"' in text, text[-300:]
        assert server.ends() not in (0, None)
        assert not Path(f"/proc/{pid}").exists()


ENDS: dict[str, Callable[[int], bool]] = {
    "TERM": lambda status: status == 0,
    "INT": lambda status: status == 0,
    "HUP": lambda status: status != 0,
    "TERM TERM": lambda status: status in (0, 128 + signal.SIGTERM),
    "INT TERM": lambda status: status in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT),
    "PIPE TERM": lambda status: status == 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("signals", ENDS)
def test_signals_end_every_process(
    model: Path, tmp_path: Path, signals: str, fault_seed: int
) -> None:
    """In the middle of streams; the children end with the server, whichever signal it was."""
    draw = random.Random(fault_seed)
    with served(model, tmp_path / "log", *OPTIONS) as server:
        children = server.children
        with server.client.stream(
            "POST", "/v1/completions", json=body(CANARY, 300, stream=True)
        ) as response:
            lines = response.iter_lines()
            for _ in range(draw.randrange(1, 30)):
                next(lines)
            for name in signals.split():
                server.signal(signal.Signals[f"SIG{name}"])
            rest: list[str] = []
            try:
                rest += lines
            except httpx.HTTPError:
                assert signals in ("HUP", "TERM TERM", "INT TERM")
        assert ENDS[signals](server.ends())
        if signals in ("TERM", "INT", "PIPE TERM"):
            assert '"finish_reason":"length"' in "".join(rest)
        for child in children:
            while _runs(child):
                pass


def _runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
