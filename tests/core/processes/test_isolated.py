"""Questions to a process that may die of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treadle.processes.isolated import IsolatedProcess, ProcessExit

CHILD = """
import os, time
from pathlib import Path
from treadle.processes import isolated
from treadle.processes.isolated import serve_requests, limit_cpu, limit_memory, resident

said = []

def answer(data):
    said.append(data)
    match data:
        case b"hello":
            limit_memory(256 << 20)
        case b"spin":
            limit_cpu(0.1)
            while True:
                pass
        case b"sleep":
            time.sleep(60)
        case b"eat":
            return bytes(1 << 30)
        case b"size":
            before = resident()
            kept = b"x" * (64 << 20)
            return str(resident() - before).encode()
        case b"wait once" | b"wait twice":
            calls = Path(__file__).with_name("calls")
            with calls.open("a") as file:
                file.write(f"{os.getpid()}\\n")
            while len(calls.read_text().splitlines()) < 2 + (data == b"wait twice"):
                time.sleep(0.01)
        case b"drip" | b"long":
            return data
        case b"pid":
            return str(os.getpid()).encode()
    return b"|".join(said)

def send(sock, data):
    if data == b"drip":  # a byte at a time, each soon enough
        for byte in (64).to_bytes(4, "little") + bytes(64):
            sock.sendall(bytes([byte]))
            time.sleep(0.05)
    elif data == b"long":
        sock.sendall((1 << 30).to_bytes(4, "little"))
        time.sleep(60)
    else:
        send_frame(sock, data)

send_frame, isolated.send_frame = isolated.send_frame, send

def main(fd):
    serve_requests(fd, answer)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IsolatedProcess]:
    (tmp_path / "isolated_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    process = IsolatedProcess("isolated_child:main", b"hello")
    yield process
    process.close()
    assert process.pid is None


def test_it_starts_when_it_is_needed_and_remembers(process: IsolatedProcess) -> None:
    assert process.pid is None
    assert process.request(b"a", 20) == b"hello|a"
    assert process.request(b"b", 20) == b"hello|a|b"
    assert process.request(b"pid", 20).decode() == str(process.pid)


@pytest.mark.parametrize(
    ("question", "seconds"),
    [(b"spin", 30.0), (b"sleep", 0.3), (b"drip", 0.3), (b"eat", 30.0), (b"long", 30.0)],
)
def test_whoever_goes_too_far_is_replaced(
    process: IsolatedProcess, question: bytes, seconds: float
) -> None:
    process.start()
    first = process.pid
    with pytest.raises(OSError) as error:
        process.request(question, seconds)
    assert isinstance(error.value, TimeoutError) is (question in (b"sleep", b"drip"))
    assert process.request(b"a", 20) == b"hello|a"
    assert process.pid != first


@pytest.mark.parametrize("times", [0, 1, 2])
def test_who_was_killed_by_others_is_asked_once_more(
    process: IsolatedProcess, tmp_path: Path, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    process.start()
    pids = [process.pid]
    if not times:
        os.kill(pids[0] or 0, signal.SIGKILL)
        assert process.request(b"a", 20) == b"hello|a", "killed while it had nothing to do"
        assert f"process {pids[0]} of " in caplog.text and "was killed by SIGKILL" in caplog.text
        return
    with ThreadPoolExecutor(1) as pool:
        question = b"wait once" if times == 1 else b"wait twice"
        answer = pool.submit(process.request, question, 60)
        for count in range(1, times + 1):
            os.kill(called(tmp_path / "calls", count), signal.SIGKILL)
        if times == 1:
            assert answer.result(60) == b"hello|wait once"
        else:
            with pytest.raises(ProcessExit, match="was killed by SIGKILL"):
                answer.result(60)
    assert len(caplog.records) == times
    process.close()
    assert len(caplog.records) == times, "its owner has killed it"


def called(path: Path, count: int) -> int:
    """The process of call number ``count``, once there is one."""
    for _ in range(6000):
        pids = path.read_text().splitlines() if path.exists() else []
        if len(pids) >= count:
            return int(pids[-1])
        time.sleep(0.01)
    raise AssertionError(f"{path} has no {count} calls")


def test_memory_is_measured(process: IsolatedProcess) -> None:
    assert 60 << 20 < int(process.request(b"size", 20)) < 70 << 20


def test_closing_does_not_wait_for_an_answer(process: IsolatedProcess) -> None:
    process.start()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            process.request(b"sleep", 60)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    start_time = time.monotonic()
    process.close()
    thread.join(20)
    assert errors and time.monotonic() - start_time < 30
    assert process.request(b"a", 20) == b"hello|a"
