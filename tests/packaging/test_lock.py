"""The lock: it covers what an installation needs, every file has a hash, and no version is unsafe."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from lock import LOCK, locked, requirements, torch_part
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from repository import ROOT, members

VERSIONS = locked(LOCK.read_text())
FLOORS = tomllib.loads(Path(__file__).with_name("floors.toml").read_text())["floors"]


def declared() -> Iterator[Requirement]:
    """What treadle's members need, those of ``treadle[all]``, extras and constraints included."""
    for member in members():
        project = member.pyproject["project"]
        for needs in [
            project.get("dependencies", []),
            *project.get("optional-dependencies", {}).values(),
        ]:
            yield from map(Requirement, needs)
    yield from map(Requirement, (ROOT / "constraints.txt").read_text().split())


def lower_bound(specifiers: SpecifierSet) -> Version:
    bounds = [Version(s.version) for s in specifiers if s.operator in (">=", "==", "~=")]
    return max(bounds, default=Version("0"))


def test_every_line_of_the_lock_is_a_version_with_hashes() -> None:
    lines = LOCK.read_text().splitlines()
    entries = [line for line in lines if not line.startswith((" ", "#"))]
    assert len(entries) == sum(map(len, VERSIONS.values())) > 40
    assert [n for n, versions in VERSIONS.items() if not all(versions.values())] == []


@pytest.mark.parametrize("member", sorted(requirements()))
def test_the_lock_satisfies_what_a_member_declares(member: str) -> None:
    for requirement in map(Requirement, requirements()[member]):
        name = canonicalize_name(requirement.name)
        if torch_part(name):
            continue
        assert name in VERSIONS, f"{name} is not locked; run `python tools/lock.py`"
        unfit = [v for v in VERSIONS[name] if not requirement.specifier.contains(v)]
        assert unfit == [], f"{requirement} and the lock differ; run `python tools/lock.py`"


def test_the_lock_has_what_its_libraries_need_in_turn() -> None:
    """pip would refuse an unlocked requirement of a locked library, having downloaded the rest."""
    missing = {
        f"{name} needs {need}"
        for name in VERSIONS
        for need in installed_needs(name)
        if canonicalize_name(need.name) not in VERSIONS and not torch_part(need.name)
    }
    assert missing == set()


def installed_needs(name: str) -> Iterator[Requirement]:
    try:
        needs = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # of another platform or Python
        return
    for need in map(Requirement, needs):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield need


def test_torch_is_pinned_beside_the_lock() -> None:
    (pin,) = map(Requirement, (ROOT / "constraints.txt").read_text().split())
    assert pin.name == "torch"
    assert [name for name in VERSIONS if torch_part(name)] == []
    version = lower_bound(pin.specifier)
    for need in declared():
        assert need.name != "torch" or need.specifier.contains(version)


@pytest.mark.parametrize("name", FLOORS)
def test_no_version_with_a_known_fault_is_allowed(name: str) -> None:
    floor = Version(FLOORS[name]["version"])
    bounds = [lower_bound(n.specifier) for n in declared() if canonicalize_name(n.name) == name]
    versions = [Version(v) for v in VERSIONS.get(name, ())]
    assert bounds or versions, f"nothing needs {name} any more; remove its floor"
    # A member may leave the bound to the core, on which it depends.
    assert not bounds or max(bounds) >= floor, FLOORS[name]["why"]
    assert [v for v in versions if v < floor] == [], FLOORS[name]["why"]


@pytest.mark.slow
def test_the_bill_of_materials_names_everything_that_is_locked(tmp_path: Path) -> None:
    """The commands of the page *Install*."""
    if (command := shutil.which("cyclonedx-py")) is None:
        pytest.skip("needs cyclonedx-bom")
    target = tmp_path / "bom.json"
    make = [command, "environment", "--output-reproducible", "--output-file", str(target)]
    subprocess.run([*make, sys.executable], check=True)
    components = json.loads(target.read_text())["components"]
    names = {canonicalize_name(c["name"]): c["version"] for c in components}
    assert {m.name: m.version for m in members()}.items() <= names.items()
    expected = {n for n in VERSIONS if any(True for _ in metadata.distributions(name=n))}
    assert len(expected) > 40 and expected <= names.keys()

    make = [
        command,
        "requirements",
        str(LOCK),
        "--output-reproducible",
        "--output-file",
        str(target),
    ]
    subprocess.run(make, check=True)
    components = json.loads(target.read_text())["components"]
    assert {c["name"] for c in components} == VERSIONS.keys()
    assert [c["name"] for c in components if not hashes(c)] == []


def hashes(component: dict[str, object]) -> list[object]:
    references = component.get("externalReferences", [])
    assert isinstance(references, list)
    return [h for r in references for h in r.get("hashes", [])]
