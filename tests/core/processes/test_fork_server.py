"""Requests beside each other, in forks of a process that may all die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treadle.processes.fork_server import ForkServer
from treadle.processes.isolated import ProcessExit

CHILD = """
import os, signal, sys
from pathlib import Path
from treadle.processes.fork_server import serve_forks
from treadle.processes.isolated import limit_cpu, limit_memory

loaded = []

def answer(data):
    loaded.append(data)
    match data.decode().split():
        case ["spin"]:
            limit_cpu(0.05)
            while True:
                pass
        case ["eat"]:
            limit_memory(64 << 20)
            return bytes(1 << 30)
        case ["crash"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["large"]:
            return bytes(1 << 20)
        case ["wait", path, times]:
            calls = Path(path)
            with calls.open("a") as file:
                file.write(f"{os.getpid()} {os.getppid()}\\n")
            while len(calls.read_text().splitlines()) <= int(times):
                signal.pause()
    return b"|".join(loaded)

def main(fd):
    serve_forks(fd, loaded.append, answer)

def interrupted(fd):
    wait = os.waitpid
    def wait_after_a_signal(*arguments):
        os.waitpid = wait
        signal.raise_signal(signal.SIGCHLD)
        return wait(*arguments)
    os.waitpid = wait_after_a_signal
    main(fd)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "forking_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ForkServer("forking_child:main", b"hello")
    yield server
    server.close()
    assert server.pid is None


def test_each_request_starts_from_what_was_loaded(server: ForkServer) -> None:
    assert server.pid is None
    assert server.request(b"a", 60) == b"hello|a"
    first = server.pid
    assert server.request(b"b", 60) == b"hello|b" and server.pid == first
    assert server.request(b"large", 60) == bytes(1 << 20)


@pytest.mark.parametrize(
    ("question", "status"), [("spin", -signal.SIGPROF), ("eat", 1), ("crash", -signal.SIGSEGV)]
)
def test_who_goes_too_far_costs_itself(server: ForkServer, question: str, status: int) -> None:
    server.start()
    first = server.pid
    with pytest.raises(ProcessExit) as error:
        server.request(question.encode(), 60)
    assert error.value.status == status and not error.value.was_killed
    assert server.request(b"a", 60) == b"hello|a" and server.pid == first


def test_forks_may_end_while_another_is_being_reaped(server: ForkServer) -> None:
    interrupted = ForkServer("forking_child:interrupted", b"hello")
    interrupted.start()
    first = interrupted.pid
    with pytest.raises(ProcessExit):
        interrupted.request(b"crash", 60)
    assert interrupted.request(b"a", 60) == b"hello|a" and interrupted.pid == first
    interrupted.close()


def calls(path: Path, count: int) -> list[tuple[int, int]]:
    """The process and its parent of each of the first ``count`` calls."""
    waited = threading.Event()
    for _ in range(6000):
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return [(int(a), int(b)) for a, b in (line.split() for line in lines)]
        waited.wait(0.01)
    raise AssertionError(f"{path} has no {count} calls")


def test_requests_run_beside_each_other(server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "calls"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.request, f"wait {path} 1".encode(), 60)
        (fork, _), *_ = calls(path, 1)
        assert server.request(b"a", 60) == b"hello|a" and not waiting.done()
        os.kill(fork, signal.SIGUSR1)
        with pytest.raises(ProcessExit) as error:
            waiting.result(60)
    assert error.value.status == -signal.SIGUSR1


@pytest.mark.parametrize("victim", ["fork", "server"])
def test_who_was_killed_by_others_is_asked_again(
    server: ForkServer, tmp_path: Path, victim: str
) -> None:
    path = tmp_path / "calls"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.request, f"wait {path} 1".encode(), 60)
        (fork, parent), *_ = calls(path, 1)
        assert parent == server.pid
        os.kill(fork if victim == "fork" else parent, signal.SIGKILL)
        if victim == "server":
            os.kill(fork, signal.SIGKILL)
        assert answer.result(60).startswith(b"hello|wait")
    assert len(calls(path, 2)) == 2
    assert (server.pid == parent) is (victim == "fork")


def test_whoever_is_killed_twice_is_named(server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "calls"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.request, f"wait {path} 2".encode(), 60)
        for count in (1, 2):
            os.kill(calls(path, count)[-1][0], signal.SIGKILL)
        with pytest.raises(ProcessExit, match="was killed by SIGKILL"):
            answer.result(60)


def test_a_server_killed_while_it_had_nothing_to_do(server: ForkServer) -> None:
    server.start()
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert server.request(b"a", 60) == b"hello|a" and server.pid != first


def test_closing_ends_the_forks(server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "calls"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.request, f"wait {path} 9".encode(), 60)
        (fork, _), *_ = calls(path, 1)
        server.close()
        with pytest.raises(ProcessExit):
            answer.result(60)
    assert len(calls(path, 1)) == 1, "it was asked again"
    deadline = time.monotonic() + 30
    while not is_dead(fork):  # the kernel ends a killed process in its own time
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.01)


def is_dead(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
