"""Nothing of a third party is imported, or held against an installation, that the user switched off."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.plugins import PluginManager, installed_kinds
from treadle.testing.examination.checks import check

MODULE = "somebody_elses_kind"
SOURCE = """
from treadle.api.plugin_kind import PluginKind
KIND = PluginKind(name="shapes", hook="treadle_shape", builds=None)
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution that declares a kind, and needs what is not installed."""
    info = tmp_path / "somebody_else-1.0.dist-info"
    info.mkdir()
    requirement = "Requires-Dist: not-installed-anywhere"
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: somebody-else\nVersion: 1.0\n{requirement}\n"
    )
    (info / "entry_points.txt").write_text(
        f"[treadle.kinds]\nshapes = {MODULE}:KIND\n[treadle.stat_loggers]\nmine = {MODULE}\n"
    )
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize(
    ("variable", "value", "is_allowed"),
    [
        ("TREADLE_PLUGIN_AUTOLOAD", "1", True),
        ("TREADLE_PLUGIN_AUTOLOAD", "0", False),
        ("TREADLE_PLUGINS", "treadle-llama,Somebody_Else", True),
        ("TREADLE_PLUGINS", "treadle-llama", False),
        ("TREADLE_DISABLED_PLUGINS", "treadle-llama", True),
        ("TREADLE_DISABLED_PLUGINS", "somebody.else", False),
    ],
)
def test_the_environment_says_who_may_declare_a_kind(
    third_party: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_allowed: bool
) -> None:
    monkeypatch.setenv(variable, value)
    kinds = installed_kinds.__wrapped__()
    assert ("shapes" in kinds) is (MODULE in sys.modules) is is_allowed
    assert {"server", "commands", "models"} <= kinds.keys(), "what treadle itself declares stays"


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_the_doctor_finds_nothing_wrong_with_what_is_off(
    third_party: None, monkeypatch: pytest.MonkeyPatch, autoload: str
) -> None:
    monkeypatch.setenv("TREADLE_PLUGIN_AUTOLOAD", autoload)
    plugins = PluginManager()
    (entry,) = (e for e in plugins.entries if e.id == "stat_loggers:mine")
    (report,), _ = check(plugins, [entry], seconds=30)
    has_problems = any(finding.fatal for finding in report.findings)
    assert has_problems is (autoload == "1") and (report.state == "disabled") is not has_problems
    assert MODULE not in sys.modules
