"""The example distributions: installed beside this environment, and tested by their own suites."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, members

HOME = ROOT / "examples/plugins"
PROJECTS = sorted(file.parent for file in HOME.glob("*/pyproject.toml"))
PUBLIC = ("treadle.api", "treadle.errors", "treadle.testing")

spec = importlib.util.spec_from_file_location("projects", ROOT / "tests/cli/projects.py")
projects: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
spec.loader.exec_module(projects)  # type: ignore[union-attr]


def test_they_are_no_members() -> None:
    assert len(PROJECTS) == 3
    assert not {p.name for p in PROJECTS} & {member.name for member in members()}


@pytest.mark.parametrize("project", PROJECTS, ids=lambda p: p.name)
def test_it_uses_the_published_surface_only(project: Path) -> None:
    for path in project.rglob("treadle_*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                is_core = name == "treadle" or name.startswith("treadle.")
                assert not is_core or name.startswith(PUBLIC), f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "project",
    [
        pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.name == "treadle-int8" else [])
        for p in PROJECTS
    ],
)
def test_it_is_installed_and_passes(project: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    projects.install(project, site)
    result = projects.run_tests([project / "tests"], site)
    assert result.returncode == 0, result.stdout[-5000:]
    command = [sys.executable, "-m", "treadle_cli", "plugin", "list"]
    environment = projects.environment(site)
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"{project.name} 0.1.0" in listed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS, ids=lambda p: p.name)
def test_pip_installs_it(project: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    pip = [sys.executable, "-m", "pip", "install", *options, str(project)]
    subprocess.run(pip, check=True, capture_output=True, timeout=120)
    result = projects.run_tests([project / "tests"], site)
    assert result.returncode == 0, result.stdout[-5000:]
