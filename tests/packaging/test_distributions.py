"""What is built and published: the root's dependencies and every member's wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from repository import ROOT, Member, kits, members, plugins

pytestmark = pytest.mark.early

BUILD = """
import os, sys
from hatchling.build import build_wheel
os.chdir(sys.argv[1])
print(build_wheel(sys.argv[2]))
"""


def build(folder: Path, target: Path, **variables: str) -> zipfile.ZipFile:
    command = [sys.executable, "-c", BUILD, str(folder), str(target)]
    environment = {**os.environ, **variables}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    return zipfile.ZipFile(target / process.stdout.split()[-1])


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def names(wheel: zipfile.ZipFile) -> list[str]:
    return [str(r).split()[0] for r in metadata(wheel).get_all("Requires-Dist", [])]


class TestRoot:
    def test_a_checkout_depends_on_the_sibling_folders(self, tmp_path: Path) -> None:
        wheel = build(ROOT, tmp_path)
        requirements = [Requirement(r) for r in metadata(wheel).get_all("Requires-Dist", [])]
        for member in members():
            line = f"{member.name} @ {member.folder.as_uri()}"
            if member.pyproject.get("tool", {}).get("treadle", {}).get("default", True):
                assert Requirement(line) in requirements
            assert Requirement(f"{line} ; extra == 'all'") in requirements

    def test_a_release_depends_on_versions_and_on_nothing_local(self, tmp_path: Path) -> None:
        wheel = build(ROOT, tmp_path, TREADLE_RELEASE="1")
        requirements = [str(r) for r in metadata(wheel).get_all("Requires-Dist", [])]
        assert [r for r in requirements if "file:" in r] == []
        for member in members():
            assert f"{member.name}=={member.version}" in {
                r.split(";")[0].strip() for r in requirements
            }

    def test_it_holds_no_code(self, tmp_path: Path) -> None:
        assert [n for n in build(ROOT, tmp_path).namelist() if n.endswith(".py")] == []

    def test_everything_that_a_member_needs_of_treadle_is_installed_by_default(self) -> None:
        default = {
            m.name
            for m in members()
            if m.pyproject.get("tool", {}).get("treadle", {}).get("default", True)
        }
        assert {"treadle-core", "treadle-server", "treadle-cli"} <= default


@pytest.mark.parametrize("member", members(), ids=lambda m: m.name)
def test_a_wheel_holds_its_package_and_nothing_else(member: Member, tmp_path: Path) -> None:
    wheel = build(member.folder, tmp_path)
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {member.package.name}
    assert f"{member.package.name}/py.typed" in wheel.namelist()
    # Whatever git keeps of the package is shipped: model files and templates too.
    listed = subprocess.run(
        ["git", "ls-files", "--", str(member.package.relative_to(ROOT))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    # A link to a folder of the repository is shipped as the files in it.
    tracked = [
        file.relative_to(member.folder).as_posix()
        for path in (ROOT / line for line in listed.stdout.splitlines())
        for file in (path.glob("*.md") if path.is_symlink() else [path])
    ]
    assert [path for path in tracked if path not in wheel.namelist()] == []
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"


# Plugins that need another one. Each entry is a reason why removing a plugin takes more with it.
NEEDS = {
    # a checkpoint is of no use without its architecture and what reads its files
    "treadle-demo": {
        "treadle-hf-tokenizer",
        "treadle-jinja",
        "treadle-llama",
        "treadle-safetensors",
    },
    # its routes are made of the server's parts
    "treadle-ollama": {"treadle-server"},
}


@pytest.mark.parametrize("member", plugins(), ids=lambda m: m.name)
def test_a_plugin_can_be_installed_with_the_core_alone(member: Member) -> None:
    """No plugin drags in the server, the command line, or another plugin."""
    distributions = {m.name for m in members()} - {m.name for m in kits()}
    assert member.dependencies & distributions == {"treadle-core"} | NEEDS.get(member.name, set())


@pytest.mark.parametrize("member", kits(), ids=lambda m: m.name)
def test_a_kit_needs_the_core_and_kits_only(member: Member) -> None:
    distributions = {m.name for m in members()} - {m.name for m in kits()}
    assert member.dependencies & distributions == {"treadle-core"}


def test_torch_is_pinned_in_the_constraints_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    assert [line for line in lines if not line.startswith("torch==")] == []
    assert len(lines) == 1


def test_requirements_dev_lists_every_member_once() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    listed = [line.removeprefix("-e ./") for line in lines if line.startswith("-e ")]
    assert sorted(listed) == sorted(member.path for member in members())


def test_the_dependencies_of_pre_commit_are_those_of_the_developer() -> None:
    """One version of ruff formats the code, whoever runs it."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert "repo: local" in hooks, "the hooks run the tools of requirements-dev.txt"
    assert "rev:" not in hooks


def test_the_root_declares_what_its_members_declare() -> None:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {m.version for m in members()} == {root["version"]}
