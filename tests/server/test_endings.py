"""Starts that hang and ends that something holds up, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.processes.logs import steps
from treadle_server.load_monitor import LoadMonitor, last_step

MONITOR = """
import sys, threading, time
from pathlib import Path
from treadle.config import PluginConfig
from treadle.plugins import PluginManager
from treadle_server.load_monitor import LoadMonitor
LoadMonitor(Path(sys.argv[1]), 1.5).start()
PluginManager(PluginConfig(plugin_file=[sys.argv[2]])).load("stat_loggers", "bad")
print("loaded")
"""
BAD = 'TREADLE = {"stat_loggers": ["bad"]}\n'
GUARD = """
import asyncio, sys, threading, time, uvloop
from treadle_server.exit_guard import ExitGuard
from treadle_server.lifecycle import Signals

async def main(guard):
    signals = Signals()
    with signals.caught(), guard.listening():
        print("ready", flush=True)
        if "blocked" in sys.argv:
            time.sleep(600)
        await signals.requested.wait()
        while "uncancelled" in sys.argv:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

with ExitGuard(0.2) as guard, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(guard))
"""
LEAVING = """
import sys, threading
from treadle_cli.leaving import leaving_threads
if "thread" in sys.argv:
    threading.Thread(target=threading.Event().wait, name="acme").start()
with leaving_threads():
    print("done")
    if "error" in sys.argv:
        raise KeyError("oh")
    sys.exit(3)
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("import time; time.sleep(600)", 1),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV),
        ("import os; os._exit(7)", 7),
    ],
)
def test_a_plugin_that_ends_a_start_is_named(end: str, status: int, tmp_path: Path) -> None:
    file, folder = tmp_path / "bad.py", tmp_path / "steps"
    folder.mkdir()
    file.write_text(BAD + end)
    process = run(MONITOR, folder, file)
    assert process.returncode == status and "loaded" not in process.stdout
    text = "importing stat_loggers:bad from bad.py "
    assert last_step(folder).startswith(text)
    if status == 1:
        assert f"{text}" in process.stderr and "takes more than a second" in process.stderr
        assert "has not ended in 1.5 s" in process.stderr
    if status != 7:
        assert f'File "{file}", line 2' in process.stderr


def test_a_step_that_has_ended_is_not_told_of(tmp_path: Path) -> None:
    monitor = LoadMonitor(tmp_path)
    monitor.start()
    try:
        steps.debug("importing %s", "acme")
        (file,) = tmp_path.iterdir()
        assert file.read_text() == "importing acme"
        steps.debug("")
        assert file.read_text() == ""
        file.rename(tmp_path / "999999999")
        assert last_step(tmp_path) == ""
    finally:
        monitor.close()


@pytest.mark.parametrize(("how", "status"), [("", 0), ("blocked", 1), ("uncancelled", 1)])
def test_a_signal_always_ends_the_process(how: str, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GUARD, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == status
    assert ("has not ended 0.2 s after the signal" in log) is bool(status)


@pytest.mark.parametrize(
    ("arguments", "status"), [((), 3), (("thread",), 3), (("thread", "error"), 1)]
)
def test_threads_of_plugins_do_not_keep_a_command(arguments: tuple[str, ...], status: int) -> None:
    process = run(LEAVING, *arguments)
    assert (process.returncode, process.stdout) == (status, "done\n")
    assert ("threads that still run: acme" in process.stderr) is bool(arguments)
    assert ("KeyError" in process.stderr) is ("error" in arguments)
