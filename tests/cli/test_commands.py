"""Subcommands come from plugins: ours, and those of others."""

from __future__ import annotations

import sys
import textwrap

import pytest

TUNE = """
    import typer
    from treadle.api import impl

    @impl
    def treadle_command(name, options):
        app = typer.Typer()

        @app.command()
        def tune(rounds: int = 3):
            print(name, rounds, dict(options))

        return app
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with one command."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    modules = []

    def write(dist, key, code, group="treadle.commands"):
        module = dist.replace("-", "_")
        modules.append(module)
        (site / f"{module}.py").write_text(textwrap.dedent(code))
        info = site / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{key} = {module}\n")

    yield write
    for module in modules:
        sys.modules.pop(module, None)  # the next test has another of that name


def test_treadle_command_of_another_distribution(treadle, install):
    install("acme-tune", "tune", TUNE)
    assert "tune (from acme-tune 1.0)" in " ".join(treadle("--help").out.split())
    assert treadle("tune", "--rounds", "5").out == "tune 5 {}\n"


def test_a_command_can_be_replaced(treadle, install):
    install("acme-chat", "commands.chat", TUNE, group="treadle.overrides")
    assert "Talk to a model in the terminal. (from acme-chat 1.0)" in treadle("--help").out
    assert treadle("chat").out == "chat 3 {}\n"


HOOK = """
    import typer
    from treadle.api import impl
    from treadle.errors import CheckpointError

    class Panic(BaseException):
        pass

    @impl
    def treadle_command(name):
        app = typer.Typer()

        @app.command()
        def run() -> None:
            %s

        %s
        return app
"""
FAILS = {
    "raise KeyError('oh')": "failed in treadle_command: KeyError: 'oh' (acme_bad.py, line ",
    "raise Panic('oh')": "failed in treadle_command: Panic: oh",
    "return None": "its treadle_command returned None",
    "return 5": "TypeError: it returned 5; a Typer application was expected",
    "return typer.Typer()": "failed in treadle_command: RuntimeError: Could not get a command",
}


@pytest.mark.fault("commands", "hook")
@pytest.mark.parametrize("fails", FAILS)
def test_a_hook_that_fails_is_one_line_and_costs_its_command(treadle, install, fails):
    install("acme-bad", "bad", HOOK % ("pass", fails))
    result = treadle("bad")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("treadle: commands:bad ") and FAILS[fails] in result.err
    assert result.err.count("\n") == 1 and "Traceback" not in result.err
    assert treadle("--help").code == 0 and treadle("plugin", "list", "commands").code == 0


@pytest.mark.fault("commands", "body")
def test_an_error_of_treadle_in_a_command_is_one_line(treadle, install):
    install("acme-bad", "bad", HOOK % ("raise CheckpointError('no such model')", ""))
    result = treadle("bad")
    assert (result.code, result.out, result.err) == (1, "", "treadle: no such model\n")


@pytest.mark.fault("commands", "body")
def test_any_other_error_in_a_command_shows_where(treadle, install):
    install("acme-bad", "bad", HOOK % ("raise ValueError('oh')", ""))
    with pytest.raises(ValueError, match="oh"):
        treadle("bad")


def test_a_broken_command_breaks_only_itself(treadle, install):
    install("acme-bad", "bad", "import missing_kernel")
    assert treadle("plugin", "list").code == 0
    result = treadle("bad")
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "treadle: commands:bad from acme-bad 1.0 failed to load: ModuleNotFoundError: "
        "No module named 'missing_kernel' (acme_bad.py, line 1)\n"
    )


def test_two_owners_of_a_command(treadle, install):
    install("one", "tune", TUNE)
    install("two", "tune", TUNE)
    shown = " ".join(treadle("--help").out.split())
    assert "tune commands:tune is provided by one 1.0, two 1.0" in shown
    assert treadle("tune").code == 1


def test_disabled_by_the_environment(treadle, install, monkeypatch):
    install("acme-tune", "tune", TUNE)
    monkeypatch.setenv("TREADLE_DISABLED_PLUGINS", "acme-tune")
    assert treadle("tune").code == 2
    assert "tune" not in treadle("--help").out
