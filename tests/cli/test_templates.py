"""Every template of ``treadle plugin new`` makes a project that passes its own test as it is."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from treadle.errors import ConfigError
from treadle.plugins import installed_kinds
from treadle_cli.templates import render

spec = importlib.util.spec_from_file_location("projects", Path(__file__).with_name("projects.py"))
projects: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
spec.loader.exec_module(projects)  # type: ignore[union-attr]

PUBLIC = ("treadle.api", "treadle.config", "treadle.errors", "treadle.layers", "treadle.testing")
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
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("projects")
    return {kind: render(kind, key, folder) for kind, key in KEYS.items()}


def test_every_kind_has_a_template(made):
    for project in made.values():
        tests = project / "tests/test_conformance.py"
        assert tests.is_file() and (project / "README.md").is_file()
        assert "$" not in tests.read_text()


@pytest.fixture(scope="module")
def site(made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, installed beside this environment."""
    folder = tmp_path_factory.mktemp("site")
    for project in made.values():
        projects.install(project, folder)
    return folder


@pytest.mark.parametrize("kind", installed_kinds())
def test_a_readme_says_what_it_changes_and_what_to_change(made, kind):
    text = (made[kind] / "README.md").read_text()
    for part in ("What it changes", "Try it", "Change first", "Develop", "Publish"):
        assert len(text.partition(f"## {part}\n\n")[2].partition("\n## ")[0]) > 8, part
    idle = (ROOT / "docs/ref/plugins.md").read_text().partition("<!-- generated: uncalled -->")[2]
    uncalled = f"`{installed_kinds()[kind].hook}`" in idle.partition("<!-- end")[0]
    assert ("does not call them" in text) == uncalled


def test_they_use_the_published_surface_only(made):
    for path in (path for project in made.values() for path in project.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            ours = [n for n in names if n.startswith("treadle") and not n.startswith("treadle_my")]
            assert all(name.startswith(PUBLIC) for name in ours), f"{path} imports {ours}"


def test_the_commands_of_the_readmes_work(made, site):
    """``treadle serve`` as far as ``--explain`` goes; what needs a checkpoint is left out."""
    text = "\n".join((project / "README.md").read_text() for project in made.values())
    lines = [line.strip() for line in text.splitlines() if line.startswith("    treadle ")]
    lines = [line for line in lines if not any(need in line for need in NEEDY)]
    served = [f"{line} --explain" if "serve" in line else line for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW, *dict.fromkeys(served)],
        env=projects.environment(site),
        cwd=site,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert len(lines) > 15 and done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^kernels +my-kernel-ops", done.stdout, re.MULTILINE)
    assert "yes" in done.stdout or "no" in done.stdout


def test_all_projects_pass_their_own_tests(made, site):
    """All at once: each must also bear the company."""
    done = projects.run_tests([p / "tests" for p in made.values()], site, "-rs")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for kind in installed_kinds():
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
    listed = json.loads(projects.call(python, "-m", "treadle_cli", "plugin", "list", "--json"))
    states = {(row["kind"], row["key"]): (row["distribution"], row["state"]) for row in listed}
    for kind, key in KEYS.items():
        assert states[kind, key] == (made[kind].name, "ready")
    projects.call(python, "-m", "treadle_cli", "doctor")


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
