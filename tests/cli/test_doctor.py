"""``treadle doctor``: what is said, and the exit code."""

from __future__ import annotations

import json

import pytest

from treadle.plugins import PluginManager
from treadle.testing.kernel_ops import KERNEL_OPS
from treadle_cli.doctor.survey import ATTENTION


def all_but(*names):
    """Options that leave only these distributions: each plugin is examined in a process of its own."""
    others = {entry.dist for entry in PluginManager().entries} - set(names)
    return [word for name in sorted(others) for word in ("--disable-plugin", name)]


def test_a_sound_installation(treadle):
    """The conformance suites examine the plugins that are left out here."""
    examined = {"treadle-core", "treadle-sdpa", "treadle-llama", "treadle-server", "treadle-cli"}
    result = treadle("doctor", "--json", *all_but(*examined))
    report = json.loads(result.out)
    assert (result.code, report["ok"], report["problems"]) == (0, True, []), report
    plugins = [p for p in report["plugins"] if p["state"] != "disabled"]
    assert {p["distribution"] for p in plugins} == examined
    assert [p for p in plugins if p["findings"]] == []
    assert {p["state"] for p in plugins} == {"loaded"}
    assert set(report["device"]["attention"]) == set(ATTENTION)
    assert set(report["device"]["kernels"]) == set(KERNEL_OPS)
    assert report["machine"]["versions"]["treadle-core"] == "0.1.0"


@pytest.mark.own_python  # what a plugin imports is looked at
def test_a_broken_plugin_fails_with_its_code(treadle, tmp_path):
    (tmp_path / "bad.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "heavy.py").write_text(
        "import numpy\nfrom treadle.api import impl\n@impl\ndef treadle_report():\n    return 'hello'\n"
    )
    files = ("--plugin-file", "bad.py", "--plugin-file", "heavy.py")
    result = treadle("doctor", *files, *all_but("treadle-sdpa"))
    assert result.code == 1
    assert "error     extensions:bad from bad.py " in result.out
    assert "dependency: its import needs the module 'not_installed_anywhere'" in result.out
    assert "warning   extensions:heavy from heavy.py " in result.out
    assert "\nreport    heavy.py " in result.out and ": hello\n" in result.out
    assert "\nattention plain: sdpa (50)\n" in result.out


@pytest.mark.own_python  # what a plugin imports is looked at
def test_warnings_fail_only_when_asked(treadle, tmp_path):
    (tmp_path / "heavy.py").write_text(
        "import numpy\nfrom treadle.api import impl\n@impl\ndef treadle_report():\n    return 'hello'\n"
    )
    others = all_but()
    assert treadle("doctor", "--plugin-file", "heavy.py", *others).code == 0
    assert treadle("doctor", "--plugin-file", "heavy.py", "--strict", *others).code == 1
