"""What must be light, and so quick: the version, the help pages, the list of plugins."""

from __future__ import annotations

import subprocess
import sys

import pytest

import treadle as package
from treadle_cli.lazy import HELP

HEAVY = ("torch", "transformers", "tokenizers", "litestar", "uvicorn", "numpy", "rich", "jinja2")


def modules_after(*arguments: str) -> set[str]:
    """The modules in memory when the command line has been run."""
    code = (
        "import sys\n"
        "from treadle_cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print('MODULES', *sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return set(process.stdout.rpartition("MODULES ")[2].split())


def test_version(treadle):
    assert treadle("--version") == (0, f"treadle {package.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("--help",),
        ("plugin", "list"),
        ("generate", "--help"),
        ("serve", "--help"),
        ("run", "--help"),
        ("batch", "--help"),
        ("bench", "throughput", "--help"),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments):
    assert not modules_after(*arguments) & set(HEAVY)


def test_help_imports_no_command():
    assert not any(m.startswith("treadle_cli.commands") for m in modules_after("--help"))


def test_plugin_list_imports_no_plugin():
    """Of all targets of entry points, only the command that lists may be in memory."""
    from treadle.plugins.entries import scan

    targets = {entry.target.partition(":")[0] for entry in scan()} - {"treadle_cli.commands.plugin"}
    assert "treadle_sdpa" in targets
    assert not modules_after("plugin", "list") & targets


def test_help_of_serve_imports_only_plugins_with_options():
    from treadle.api.plugin_options import declared_options
    from treadle.plugins import PluginManager
    from treadle.plugins.entries import scan

    targets = {entry.target.partition(":")[0] for entry in scan()}
    imported = modules_after("serve", "--help") & targets - {"treadle_cli.commands.serve"}
    plugins = PluginManager()
    declaring = {
        entry.target.partition(":")[0]
        for entry in plugins.entries
        if declared_options(plugins.load(entry.kind, entry.key))
    }
    assert imported == declaring and "treadle_jinja" in imported


def test_help_lists_the_commands_in_order(treadle):
    result = treadle("--help")
    # A long help text goes on in a second line, which is indented further.
    lines = result.out.partition("Commands:")[2].splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ") and line[2:3].strip()]
    assert names[: len(HELP)] == list(HELP)


def test_no_arguments_is_help(treadle):
    assert "Usage: treadle [OPTIONS] COMMAND" in treadle().err


def test_an_unknown_command(treadle):
    result = treadle("generat")
    assert result.code == 2 and "No such command 'generat'" in result.err
