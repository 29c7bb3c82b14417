"""Children that compute end when their parent does, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treadle.processes.spawn import spawn

# The child says that it watches, and then never looks at its socket again. A call through ``PyDLL`` keeps
# the interpreter's lock, as a launch does that waits for room in the device's queue.
CHILD = """
import ctypes, os, socket, time
from treadle.processes.lifeline import end_with_parent
from treadle_executor_mp.worker import kill_with_parent_thread

def ready(fd):
    sock = socket.socket(fileno=fd)
    sock.sendall(b"%d\\n" % os.getpid())
    return sock

def watching(fd):
    end_with_parent(fd)
    sock = ready(fd)
    time.sleep(600)

def graceful(fd):
    end_with_parent(fd, grace=600)
    sock = ready(fd)
    sock.recv(1)
    os._exit(7)

def locked(fd):
    end_with_parent(fd)
    kill_with_parent_thread()
    sock = ready(fd)
    ctypes.PyDLL(None).sleep(600)
"""

PARENT = """
import os, sys, time
from treadle.processes.spawn import spawn

child, sock = spawn(sys.argv[1])
if sys.argv[2] == "forks" and os.fork() == 0:
    time.sleep(600)
print(sock.recv(20).decode(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lifeline_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def gone(pid: int, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("entry", ["watching", "locked"])
@pytest.mark.parametrize("how", ["alone", "forks"])
def test_a_child_ends_when_its_parent_is_killed(path: Path, entry: str, how: str) -> None:
    """Also if a fork of the parent keeps its end of the socket open."""
    command = [sys.executable, "-c", PARENT, f"lifeline_child:{entry}", how]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
    ) as parent:
        assert parent.stdout is not None
        try:
            child = int(parent.stdout.readline())
            assert is_running(child)
            parent.kill()
            assert gone(child)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_child_ends_when_its_socket_is_closed(path: Path) -> None:
    child, sock = spawn("lifeline_child:watching")
    assert int(sock.recv(20)) == child.pid
    sock.close()
    assert child.wait(30) == 1


def test_a_child_with_grace_ends_in_its_own_way(path: Path) -> None:
    child, sock = spawn("lifeline_child:graceful")
    sock.recv(20)
    sock.close()
    assert child.wait(30) == 7
