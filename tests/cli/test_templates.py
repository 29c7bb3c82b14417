"""Every template of ``treadle plugin new`` makes a project that passes its own test as it is."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from treadle.errors import ConfigError
from treadle.plugins import installed_kinds
from treadle_cli.templates import render

pytestmark = pytest.mark.early

spec = importlib.util.spec_from_file_location("projects", Path(__file__).with_name("projects.py"))
projects: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
spec.loader.exec_module(projects)  # type: ignore[union-attr]

PUBLIC = ("treadle.api", "treadle.config", "treadle.errors", "treadle.testing")
PUBLIC += ("treadle_cli.testing", "treadle_server.testing")
PUBLIC += ("treadle_layers_kit", "treadle_parsing_kit")
NEEDY = ("doctor", "FOLDER", "model.zip")
FOLLOW = """
import shlex, sys
from treadle_cli.main import main
for line in sys.argv[1:]:
    print("$", line, flush=True)
    try:
        main(shlex.split(line)[1:])
    except SystemExit as ended:
        if ended.code:
            raise
"""

KEYS = {kind: f"my-{kind.replace('_', '-')}" for kind in installed_kinds()} | {
    "models": "MyForCausalLM"
}


@pytest.fixture(scope="module")
def generated_projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("projects")
    return {kind: render(kind, key, folder) for kind, key in KEYS.items()}


def test_every_kind_has_a_template(generated_projects):
    for project in generated_projects.values():
        tests = project / "tests/test_conformance.py"
        assert tests.is_file() and (project / "README.md").is_file()
        assert "$" not in tests.read_text()
        assert {"__pycache__/", "dist/"} <= set((project / ".gitignore").read_text().split())


def test_a_project_declares_the_generation_that_treadle_speaks(tmp_path, monkeypatch):
    kind = replace(installed_kinds()["tool_parsers"], generation=3)
    monkeypatch.setattr("treadle_cli.templates.installed_kinds", lambda: {"tool_parsers": kind})
    project = render("tool_parsers", "mine", tmp_path)
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert about["entry-points"] == {"treadle.tool_parsers.v3": {"mine": "treadle_mine"}}
    assert "tool__parsers%20v3" in (project / "README.md").read_text()


@pytest.mark.parametrize("kind", installed_kinds())
def test_a_project_can_be_published_as_it_is(generated_projects, kind):
    project = generated_projects[kind]
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert about["license"] == "Apache-2.0" and about["license-files"] == ["LICENSE"]
    assert (project / "LICENSE").read_text() == (Path(__file__).parents[2] / "LICENSE").read_text()
    assert {"treadle-plugin", kind} <= set(about["keywords"])
    assert "Typing :: Typed" in about["classifiers"]
    badge = f"badge/treadle-{kind.replace('_', '__')}%20v{installed_kinds()[kind].generation}-blue"
    assert badge in (project / "README.md").read_text()


@pytest.mark.parametrize("kind", installed_kinds())
def test_the_checks_of_a_project_run_with_every_core(generated_projects, kind):
    """The doctor and the suites, with the range of treadle that the project itself declares."""
    project = generated_projects[kind]
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    workflow = yaml.safe_load((project / ".github/workflows/test.yml").read_text())
    job = workflow["jobs"]["test"]
    cores = re.findall(
        r'\["oldest", "newest", "main"\]|\["oldest", "newest"\]', job["strategy"]["matrix"]["core"]
    )
    assert len(cores) == 2
    steps = [step for step in job["steps"] if "run" in step]
    installs = {step["if"]: step["run"] for step in steps if "if" in step}
    assert installs.keys() == {f"matrix.core == '{core}'" for core in ("oldest", "newest", "main")}
    assert "--resolution lowest-direct ." in installs["matrix.core == 'oldest'"]
    (core,) = (need for need in about["dependencies"] if need.startswith("treadle-core"))
    released = [run for condition, run in installs.items() if "main" not in condition]
    assert all(f'"{core.replace("-core", "-cli")}"' in run for run in released)
    checks = [step["run"] for step in steps if "if" not in step][1:]
    assert checks == ["treadle doctor", f"treadle plugin test {kind}:{KEYS[kind]}", "pytest tests"]


@pytest.fixture(scope="module")
def python(generated_projects, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an environment into which one pip has installed all of them, from nothing but the projects."""
    python = projects.scratch(tmp_path_factory.mktemp("venv") / "venv")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    projects.call(python, "-m", "pip", "install", *options, *map(str, generated_projects.values()))
    return python


@pytest.mark.parametrize("kind", installed_kinds())
def test_a_readme_says_what_it_changes_and_what_to_change(generated_projects, kind):
    text = (generated_projects[kind] / "README.md").read_text()
    for part in ("What it changes", "Try it", "Change first", "Develop", "Publish"):
        assert len(text.partition(f"## {part}\n\n")[2].partition("\n## ")[0]) > 8, part


def test_they_use_the_published_surface_only(generated_projects):
    for path in (path for project in generated_projects.values() for path in project.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules = [
                n for n in names if n.startswith("treadle") and not n.startswith("treadle_my")
            ]
            assert all(name.startswith(PUBLIC) for name in modules), f"{path} imports {modules}"


@pytest.mark.slow
def test_the_commands_of_the_readmes_work(generated_projects, python):
    """``treadle serve`` as far as ``--explain`` goes; what needs a checkpoint is left out."""
    text = "\n".join((project / "README.md").read_text() for project in generated_projects.values())
    lines = [line.strip() for line in text.splitlines() if line.startswith("    treadle ")]
    lines = [line for line in lines if not any(need in line for need in NEEDY)]
    # A small cache: by default each engine clears a gigabyte.
    served = [
        f"{line} --explain" if "serve" in line else f"{line} --num-pages 64" for line in lines
    ]
    printed = projects.call(python, "-c", FOLLOW, *dict.fromkeys(served))
    assert len(lines) > 15
    assert re.search(r"^kernels +my-kernel-ops", printed, re.MULTILINE)
    assert "yes" in printed or "no" in printed


def test_all_projects_pass_their_own_tests(generated_projects, python):
    """All at once: each must also bear the company."""
    tests = [project / "tests" for project in generated_projects.values()]
    assert len(tests) == len(installed_kinds()) and all(folder.is_dir() for folder in tests)
    printed = projects.call(python, *projects.PYTEST, "-rs", *map(str, tests))
    assert int(printed.rsplit(" passed", 1)[0].split()[-1]) > 22 * 6


def test_every_project_is_ready_once_installed(generated_projects, python):
    listed = json.loads(projects.call(python, "-m", "treadle_cli", "plugin", "list", "--json"))
    states = {(row["kind"], row["key"]): (row["distribution"], row["state"]) for row in listed}
    for kind, key in KEYS.items():
        assert states[kind, key] == (generated_projects[kind].name, "ready")
    own = {project.name for project in generated_projects.values()}
    others = sorted({row["distribution"] for row in listed} - own)
    # Each plugin is examined in a process of its own; test_doctor.py examines the others.
    off = [word for name in others for word in ("--disable-plugin", name)]
    projects.call(python, "-m", "treadle_cli", "doctor", *off)


def test_the_projects_are_clean(generated_projects):
    """The documentation shows them, and its examples are formatted like code."""
    folders = [str(project) for project in generated_projects.values()]
    config = str(Path(__file__).parents[2] / "pyproject.toml")
    for action in (["check"], ["format", "--check", "--diff"]):
        lint = [sys.executable, "-m", "ruff", *action, "--config", config, *folders]
        process = subprocess.run(lint, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("policy", "x", "there is no plugin kind 'policy'; known kinds: model_sources"),
        ("scheduling_policies", "1x", "it begins with a letter"),
        ("scheduling_policies", "a b", "it begins with a letter"),
        ("scheduling_policies", "../x", "it begins with a letter"),
        ("scheduling_policies", "x-", "ends with a letter or digit"),
        (
            "scheduling_policies",
            "core",
            "treadle-core, which 'core' makes, is a distribution of treadle",
        ),
        ("scheduling_policies", "llama", "is a distribution of treadle"),
        ("model_sources", "my_zip", "the scheme of my_zip:path"),
        ("model_sources", "Zip", "in lower case"),
    ],
)
def test_what_cannot_be_is_refused(kind, key, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        render(kind, key, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    render("scheduling_policies", "x", tmp_path)
    with pytest.raises(ConfigError, match="exists; remove it"):
        render("scheduling_policies", "x", tmp_path)


def test_the_name_of_another_distribution_is_refused(tmp_path, monkeypatch):
    info = tmp_path / "treadle_mine-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: treadle-mine\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"treadle-mine 2\.0 is installed"):
        render("scheduling_policies", "mine", tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        render("scheduling_policies", "x", tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        render("scheduling_policies", "x" * 300, tmp_path)
