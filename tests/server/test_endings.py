"""Starts that hang and ends that something holds up, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.plugins import installed_kinds
from treadle.processes.logs import steps
from treadle_server.load_monitor import LIGHT, LoadMonitor, last_step, limit_of

MONITOR = """
import sys, threading, time
from pathlib import Path
from treadle.api.kinds import STAT_LOGGERS
from treadle.config import PluginConfig
from treadle.plugins import PluginManager
from treadle_server.load_monitor import LoadMonitor
LoadMonitor(Path(sys.argv[1]), 1.5).start()
plugins = PluginManager(PluginConfig(plugin_file=[sys.argv[2]]))
plugins.load("stat_loggers", "bad")
print("loaded", flush=True)
plugins.create(STAT_LOGGERS, "bad")
"""
BAD = 'TREADLE = {"stat_loggers": ["bad"]}\n'
HOOK = "from treadle.api import impl\n@impl\ndef treadle_stat_logger():\n    "
CRASH = "import os; os.kill(os.getpid(), 11)"
EXIT = "import os; os._exit(7)"
OVERFLOW = (
    "import ctypes, sys, threading; sys.setrecursionlimit(10**9); threading.stack_size(1 << 18); "
    "f = ctypes.CFUNCTYPE(None)(lambda: f()); t = threading.Thread(target=f); t.start(); t.join()"
)
RECURSION = "f = lambda: f(); f()"
GUARD = """
import asyncio, sys, threading, time, uvloop
from treadle_server.exit_guard import ExitGuard
from treadle_server.signals import Signals

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


@pytest.mark.own_python
@pytest.mark.parametrize("where", ["importing", "calling"])
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("import time; time.sleep(600)", 1),
        (CRASH, -signal.SIGSEGV),
        (OVERFLOW, -signal.SIGSEGV),
        (EXIT, 7),
    ],
    ids=["hang", "crash", "overflow", "exit"],
)
def test_a_plugin_that_ends_a_start_is_named(
    where: str, end: str, status: int, tmp_path: Path
) -> None:
    file, folder = tmp_path / "bad.py", tmp_path / "steps"
    folder.mkdir()
    file.write_text(BAD + (HOOK if where == "calling" else "") + end)
    process = run(MONITOR, folder, file)
    assert process.returncode == status, process.stderr
    assert ("loaded" in process.stdout) is (where == "calling")
    text = f"{where} stat_loggers:bad from bad.py "
    if where == "calling":
        text = "calling treadle_stat_logger of stat_loggers:bad from bad.py "
    assert last_step(folder).startswith(text)
    if status == 1:
        assert f"{text}" in process.stderr and "takes more than 1 s" in process.stderr
        assert "has not ended in 1.5 s" in process.stderr
        assert "--disable-plugin DIST" in process.stderr and "plugin bisect" in process.stderr
    if end not in (OVERFLOW, EXIT):  # faulthandler has a stack of its own in the main thread only
        assert f'File "{file}", line ' in process.stderr


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        ("importing tool_parsers:mine from acme 1", 60),
        ("calling treadle_server of server:mine from acme 1", 60),
        ("importing models:MineForCausalLM from acme 1", 120),
        ("calling treadle_executor of executors:mine from acme 1", 120),
    ],
)
def test_the_limit_is_that_of_the_kind(step: str, seconds: float) -> None:
    assert limit_of(step) == seconds


def test_every_light_kind_is_a_kind() -> None:
    assert set(installed_kinds()) >= LIGHT


@pytest.mark.parametrize("hook", ["", HOOK], ids=["import", "hook"])
def test_endless_recursion_is_an_error_that_names_the_plugin(hook: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(BAD + hook + RECURSION)
    process = run(MONITOR, tmp_path, file)
    words = "failed in treadle_stat_logger: " if hook else "failed to load: "
    assert "PluginLoadError: stat_loggers:bad from bad.py" in process.stderr
    assert f"{words}RecursionError" in process.stderr and "bad.py, line" in process.stderr


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


WITNESS = """
import os, sys
from pathlib import Path
from treadle_server.load_monitor import StartWitness
folder = Path(sys.argv[1])
witness = StartWitness(folder)
(folder / str(os.getpid())).write_text(sys.argv[2])
if sys.argv[3] == "dismiss":
    witness.dismiss()
os.kill(os.getpid(), 11)
"""


@pytest.mark.parametrize(
    ("step", "action", "is_told"),
    [
        ("importing server:bad from acme 1.0", "die", True),
        ("", "die", False),
        ("importing server:bad from acme 1.0", "dismiss", False),
    ],
)
def test_a_server_that_dies_while_it_starts_says_where(
    tmp_path: Path, step: str, action: str, is_told: bool
) -> None:
    """It has no parent that would, and a stack that overflows in a thread leaves no trace."""
    folder = tmp_path / "steps"
    folder.mkdir()
    process = run(WITNESS, folder, step, action)
    assert process.returncode == -signal.SIGSEGV
    told = "treadle: the process of the server ended importing server:bad from acme 1.0\n"
    assert (told in process.stderr) is is_told, process.stderr
    assert folder.exists() is (action == "dismiss")
