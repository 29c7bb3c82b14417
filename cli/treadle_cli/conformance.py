"""``treadle plugin test``: the suites of ``treadle.testing`` on one plugin, in a pytest of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from treadle.config import PluginConfig
from treadle.errors import ConfigError
from treadle.known_plugins import install_hint
from treadle.plugins import installed_kinds
from treadle.testing.catalog import ALONE, SUITES

__all__ = ("run", "source")


def source(id: str, config: PluginConfig) -> str:
    """The test file for ``kind:key``."""
    kind, _, key = id.partition(":")
    module, _, suite = SUITES[kind].partition(":") if kind in ALONE else ("", "", "")
    lines = ["from treadle.config import PluginConfig", "from treadle.plugins import PluginManager"]
    lines += ["from treadle.testing.plugin import PluginSuite"]
    lines += [f"from {module} import {suite}"] if suite else []
    files = [str(Path(name).resolve()) for name in config.plugin_file]
    chosen = f"pin_plugin={config.pin_plugin!r}, disable_plugin={config.disable_plugin!r}, plugin_file={files!r}"
    parts = f"PluginSuite, {suite}" if suite else "PluginSuite"
    return "\n".join(
        [
            *lines,
            "",
            "",
            f"class TestPlugin({parts}):",
            f"    plugin = {id!r}",
            *([f"    key = {key!r}"] if kind == "attention_backends" else []),
            "",
            "    def host(self):",
            f"        return PluginManager(PluginConfig({chosen}))",
            *(["", "    def bid(self, request):", *BID] if kind == "attention_backends" else []),
            "",
        ]
    )


# Not the suite's own host, which does not know the flags of this command.
BID = (
    "        offers, refusals = self.host().attention_bids(request)",
    "        return next(bid for bid in [*offers, *refusals] if bid.name == self.key)",
)


def run(id: str, config: PluginConfig) -> int:
    """Run the suites; return pytest's exit code.

    Raises ``ConfigError`` without pytest, and without the distribution that the suite is in.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("treadle plugin test needs pytest; pip install pytest")
    kind = id.partition(":")[0]
    home = SUITES.get(kind, "").partition(".")[0]
    if home and importlib.util.find_spec(home) is None:
        owner = installed_kinds()[kind].owner
        raise ConfigError(f"the suite of {kind} is in {owner}; {install_hint(owner)}")
    if kind in SUITES and kind not in ALONE:
        _, _, name = SUITES[kind].partition(":")
        print(f"{name} must be told what to try: subclass it in a test; here runs PluginSuite")
    with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
        file = Path(folder) / "test_plugin.py"
        file.write_text(source(id, config), encoding="utf-8")
        # Without pytest-asyncio, which warns of settings that no suite needs.
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio"]
        options += ["--rootdir", folder, "-c", "/dev/null"]
        command = [sys.executable, "-m", "pytest", *options, str(file)]
        sys.stdout.flush()
        return subprocess.run(command, check=False).returncode
