"""Who was killed because memory ran out is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from treadle_server import memory_watch
from treadle_server.child_processes import child_memory
from treadle_server.memory_watch import MemoryWatch


def sleeper() -> subprocess.Popen[bytes]:
    code = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", f"'from treadle.engine.process import main'; {code}"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


@pytest.mark.parametrize(
    "text", ["low 0\noom 3\noom_kill {}\noom_group_kill 0\n", "a 1\noom_kill {}"]
)
def test_who_was_killed_for_want_of_memory_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text(text.format(4))
    watch = MemoryWatch([tmp_path / "none", counter])
    child = sleeper()
    # Another test of this process may have an engine.
    monkeypatch.setattr(
        memory_watch,
        "child_memory",
        lambda: {pid: p for pid, p in child_memory().items() if pid == child.pid},
    )
    try:
        watch.look()
        reason = "its process was killed by SIGKILL; see its log above"
        assert watch.explain("its process exited with status 1") == ""
        assert watch.explain(reason).startswith(
            " (not for want of memory, as the system counts it; it had 0.0"
        )
        child.kill()
        child.wait(10)
        counter.write_text(text.format(5))
        assert watch.explain(reason).startswith(" (out of memory: the system killed it; it had 0.0")
        watch.look()
        assert (
            f"the system killed 1 process; of this server: engine (process {child.pid}, 0.0"
            in caplog.text
        )
        assert watch.explain(reason) == " (out of memory: the system killed it)"
    finally:
        child.kill()
        child.communicate()


def test_without_a_counter_the_reason_is_probable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "child_memory", dict)
    watch = MemoryWatch([tmp_path / "none"])
    watch.look()
    assert watch.explain("was killed by SIGKILL") == " (probably out of memory)"
