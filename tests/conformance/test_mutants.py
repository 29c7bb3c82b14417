"""Every check of every suite bites: a plugin that is wrong in one way fails it, and no other."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from copy import copy
from functools import cache
from pathlib import Path

import mutants
import pytest
from checks import failing
from mutants.specimen import Specimen

import treadle.testing
from treadle.config import PluginConfig
from treadle.plugins import Entry, PluginManager
from treadle.plugins.entries import scan
from treadle.testing.catalog import SUITES
from treadle.testing.plugin import PluginSuite

SPECIMENS: dict[str, Specimen] = {
    f"{module.name}-{number}-{specimen.suite.__name__}": specimen
    for module in pkgutil.iter_modules(mutants.__path__)
    if module.name != "specimen"
    for number, specimen in enumerate(importlib.import_module(f"mutants.{module.name}").SPECIMENS)
}
MUTANTS = {
    f"{name}-{number}-{mutant.fails}": (specimen, mutant)
    for name, specimen in SPECIMENS.items()
    for number, mutant in enumerate(specimen.mutants)
}


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """A plugin that was installed for one test is imported anew for the next."""
    before = set(sys.modules)
    yield
    for name in {"mine"} & (set(sys.modules) - before):
        del sys.modules[name]


def subject(specimen: Specimen, folder: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    """The suite over the plugin, which is written into ``folder``."""
    file = folder / "mine.py"
    file.write_text(specimen.source)
    if specimen.metadata:
        info = folder / "mine-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(specimen.metadata)
        (info / "entry_points.txt").write_text(
            f"[treadle.{specimen.kind}]\n{specimen.key} = mine\n"
        )
        monkeypatch.syspath_prepend(str(folder))

    class Subject(specimen.suite):  # type: ignore[name-defined, misc]
        plugin = specimen.plugin

        def plugin_manager(self) -> PluginManager:
            options = {self.plugin: dict(self.options)} if self.options else {}
            if specimen.metadata:
                return PluginManager(PluginConfig(plugin_options=options))
            local = PluginConfig(plugin_file=[str(file)], plugin_options=options)
            return PluginManager(local, source=lambda: map(copy, installed()))

    return Subject


@cache
def installed() -> list[Entry]:
    """Read once: every check makes hosts, and reading is most of their time."""
    return list(scan())


@pytest.mark.parametrize("name", SPECIMENS)
def test_a_sound_plugin_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specimen = SPECIMENS[name]
    assert failing(subject(specimen, tmp_path, monkeypatch), tmp_path, specimen.only) == {}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_its_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specimen, mutant = MUTANTS[name]
    broken = subject(specimen.mutated(mutant), tmp_path, monkeypatch)
    own = {mutant.fails, *mutant.also}
    assert set(failing(broken, tmp_path, specimen.only, own)) == own


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_its_check_and_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specimen, mutant = MUTANTS[name]
    broken = subject(specimen.mutated(mutant), tmp_path, monkeypatch)
    failures = failing(broken, tmp_path, specimen.only)
    assert set(failures) == {mutant.fails, *mutant.also}, failures


def suites() -> Iterator[type]:
    """Every class of ``treadle.testing`` that has checks of its own."""
    for module in pkgutil.iter_modules(treadle.testing.__path__):
        for value in vars(importlib.import_module(f"treadle.testing.{module.name}")).values():
            if isinstance(value, type) and any(n.startswith("test_") for n in vars(value)):
                yield value


def checks(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")}


def of_kind(name: str) -> type:
    module, _, suite = name.partition(":")
    suite_class: type = getattr(importlib.import_module(module), suite)
    return suite_class


WHOLE = {suite.__name__: suite for suite in (PluginSuite, *map(of_kind, SUITES.values()))}


@pytest.mark.parametrize("suite", WHOLE.values(), ids=WHOLE)
def test_every_check_has_a_mutant(suite: type) -> None:
    mine = [specimen for specimen in SPECIMENS.values() if issubclass(specimen.suite, suite)]
    assert checks(suite) - {mutant.fails for s in mine for mutant in s.mutants} == set()


def test_every_suite_is_one_of_these_or_a_part_of_one() -> None:
    complete = tuple(WHOLE.values())
    assert [s for s in suites() if not any(issubclass(base, s) for base in complete)] == []
