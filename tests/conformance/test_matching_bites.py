"""Each check of ``Matching`` bites: for each there is a plugin that fails it, and no other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from weft.api.matching import ModelTraits
from weft.config import PluginConfig
from weft.plugins import Host
from weft.testing.matching import Matching

spec = importlib.util.spec_from_file_location(
    "checks_of_matching", Path(__file__).with_name("checks.py")
)
assert spec is not None and spec.loader is not None
checks: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)

SOUND = """
from weft.api import impl
from weft.api.matching import Match

WEFT = {"tool_parsers": ["mine"]}


@impl
def weft_match(kind, key, model):
    if (kind, key) == ("tool_parsers", "mine") and model.writes("<call>"):
        return Match(100, "the chat template writes <call>")
"""
MUTANTS = {
    "test_it_matches_its_models": ("<call>", "<calls>"),
    "test_it_leaves_other_models_alone": ('model.writes("<call>")', "model.templates"),
    "test_it_matches_under_its_own_key_only": ('(kind, key) == ("tool_parsers", "mine") and ', ""),
    "test_its_reason_can_be_shown": ("100", "0"),
}


def failing(text: str, folder: Path) -> set[str]:
    file = folder / "plugin.py"
    file.write_text(text)

    class Mine(Matching):
        plugin = "tool_parsers:mine"
        matched = [ModelTraits(templates={"tool_use": "{{ messages }}<call>"})]

        def host(self) -> Host:
            return Host(PluginConfig(plugin_file=[str(file)]))

    return set(checks.failing(Mine, folder))


def test_a_sound_plugin_passes(tmp_path: Path) -> None:
    assert failing(SOUND, tmp_path) == set()


@pytest.mark.parametrize("check", MUTANTS)
def test_a_mutant_fails_its_check_and_no_other(check: str, tmp_path: Path) -> None:
    old, new = MUTANTS[check]
    assert old in SOUND
    assert failing(SOUND.replace(old, new), tmp_path) == {check}


def test_every_check_has_a_mutant() -> None:
    assert {name for name in dir(Matching) if name.startswith("test_")} == set(MUTANTS)
