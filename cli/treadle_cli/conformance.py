"""``treadle plugin test``: the suites of ``treadle.testing`` on one plugin, in a separate pytest process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from treadle.config import PluginConfig
from treadle.errors import ConfigError
from treadle.known_plugins import install_hint
from treadle.plugins import installed_kinds
from treadle.processes.spawn import exit_reason
from treadle.testing.catalog import STANDALONE_KINDS, SUITES

__all__ = ("TIMEOUT", "render_test_file", "run")

TIMEOUT = 600.0
"""Seconds that the suites of one plugin may take."""


def render_test_file(id: str, config: PluginConfig) -> str:
    """Return the source of a test file for ``kind:key``."""
    kind = id.partition(":")[0]
    module, _, suite = SUITES[kind].partition(":") if kind in STANDALONE_KINDS else ("", "", "")
    lines = ["from treadle.config import PluginConfig", "from treadle.plugins import PluginManager"]
    lines += ["from treadle.testing.plugin import PluginSuite"]
    lines += [f"from {module} import {suite}"] if suite else []
    files = [str(Path(name).resolve()) for name in config.plugin_file]
    config_args = f"pin_plugin={config.pin_plugin!r}, disable_plugin={config.disable_plugin!r}, plugin_file={files!r}"
    bases = f"PluginSuite, {suite}" if suite else "PluginSuite"
    return "\n".join(
        [
            *lines,
            "",
            "",
            f"class TestPlugin({bases}):",
            f"    plugin = {id!r}",
            "",
            "    def plugin_manager(self):",
            f"        return PluginManager(PluginConfig({config_args}))",
            "",
        ]
    )


def run(id: str, config: PluginConfig, seconds: float = TIMEOUT) -> int:
    """Run the suites; return pytest's exit code, 1 if they do not end within ``seconds``.

    Raises ``ConfigError`` without pytest, and without the distribution that the suite is in.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("treadle plugin test needs pytest; pip install pytest")
    kind = id.partition(":")[0]
    package = SUITES.get(kind, "").partition(".")[0]
    if package and importlib.util.find_spec(package) is None:
        owner = installed_kinds()[kind].owner
        raise ConfigError(f"the suite of {kind} is in {owner}; {install_hint(owner)}")
    if kind in SUITES and kind not in STANDALONE_KINDS:
        _, _, name = SUITES[kind].partition(":")
        print(f"{name} needs test cases: subclass it in a test. Running PluginSuite only.")
    with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
        file = Path(folder) / "test_plugin.py"
        file.write_text(render_test_file(id, config), encoding="utf-8")
        # Without pytest-asyncio, which warns of settings that no suite needs.
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio"]
        options += ["--rootdir", folder, "-c", "/dev/null"]
        options += ["-p", "treadle.testing.session", "-o", f"faulthandler_timeout={seconds / 2}"]
        command = [sys.executable, "-m", "pytest", *options, str(file)]
        sys.stdout.flush()
        status = _wait(command, seconds)
        ended = Path(folder) / "session"
        if status is None:
            problem = (
                f"the tests of {id} did not end within {seconds:g} s and were killed; the "
                " thread that hangs is shown above, --timeout gives them longer"
            )
        elif not ended.is_file():
            problem = f"{id} ended the process of its tests ({exit_reason(status)})"
        elif names := ended.read_text(encoding="utf-8"):
            problem = (
                f"{id} left a thread that keeps a server from ending: {names}; end it with the object "
                "that started it, or make it a daemon"
            )
        else:
            return status
    print(f"treadle: {problem}", file=sys.stderr)
    return 1


def _wait(command: list[str], seconds: float) -> int | None:
    """Run a command and return its status, ``None`` if it was killed after ``seconds``.

    What it has started is killed with it.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as child:
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
