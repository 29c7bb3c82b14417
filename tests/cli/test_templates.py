"""Every template of ``weft plugin new`` makes a project that passes its own test as it is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.plugins import KINDS
from weft_cli.templates import render

spec = importlib.util.spec_from_file_location("projects", Path(__file__).with_name("projects.py"))
projects: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
spec.loader.exec_module(projects)  # type: ignore[union-attr]

KEYS = {kind: f"my-{kind.replace('_', '-')}" for kind in KINDS} | {"models": "MyForCausalLM"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("projects")
    return {kind: render(kind, key, folder) for kind, key in KEYS.items()}


def test_every_kind_has_a_template(made):
    for project in made.values():
        tests = project / "tests/test_conformance.py"
        assert tests.is_file() and (project / "README.md").is_file()
        assert "$" not in tests.read_text()


def test_all_projects_pass_their_own_tests(made, tmp_path):
    """All at once, installed beside this environment: each must also bear the company."""
    site = tmp_path / "site"
    site.mkdir()
    for project in made.values():
        projects.install(project, site)
    done = projects.run_tests([p / "tests" for p in made.values()], site, "-rs")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for kind in KINDS:
        assert made[kind].joinpath("tests").is_dir()
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) > 22 * 6


def test_the_projects_are_clean(made):
    """The documentation shows them, and its examples are formatted like code."""
    folders = [str(project) for project in made.values()]
    config = str(Path(__file__).parents[2] / "pyproject.toml")
    for action in (["check"], ["format", "--check", "--diff"]):
        lint = [sys.executable, "-m", "ruff", *action, "--config", config, *folders]
        done = subprocess.run(lint, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_pip_installs_every_project(made, tmp_path):
    """In an environment of its own, by one pip, from nothing but the projects."""
    python = projects.scratch(tmp_path / "venv")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    projects.call(python, "-m", "pip", "install", *options, *map(str, made.values()))
    tests = [str(project / "tests") for project in made.values()]
    projects.call(python, *projects.PYTEST, *tests)
    listed = json.loads(projects.call(python, "-m", "weft_cli", "plugin", "list", "--json"))
    states = {(row["kind"], row["key"]): (row["distribution"], row["state"]) for row in listed}
    for kind, key in KEYS.items():
        assert states[kind, key] == (made[kind].name, "ready")
    projects.call(python, "-m", "weft_cli", "doctor")


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("policy", "x", "there is no plugin kind 'policy'; known kinds: model_sources"),
        ("policies", "1x", "it begins with a letter"),
        ("policies", "a b", "it begins with a letter"),
        ("policies", "../x", "it begins with a letter"),
    ],
)
def test_what_cannot_be_is_refused(kind, key, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        render(kind, key, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    render("policies", "x", tmp_path)
    with pytest.raises(ConfigError, match="exists; remove it"):
        render("policies", "x", tmp_path)
