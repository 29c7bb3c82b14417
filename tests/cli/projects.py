"""Installing a project without pip: what pip would leave in a site folder, from the pyproject."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null")
PYTEST += ("-o", "asyncio_default_fixture_loop_scope=function", "--import-mode=importlib")


def install(project: Path, site: Path) -> None:
    """Copy the package of ``project`` and write its metadata."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    package = about["name"].replace("-", "_")
    shutil.copytree(project / package, site / package)
    info = site / f"{package}-{about['version']}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {need}\n" for need in about.get("dependencies", ()))
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n{needs}"
    )
    groups = about.get("entry-points", {}).items()
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()) for g, keys in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))


def environment(site: Path) -> dict[str, str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("TREADLE_", "PYTEST_"))}
    return {**variables, "PYTHONPATH": str(site)}


def run_tests(tests: Iterable[Path], site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest on the tests of projects, with ``site`` beside this environment."""
    return subprocess.run(
        [sys.executable, *PYTEST, *options, *map(str, tests)],
        env=environment(site),
        cwd=site,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def scratch(folder: Path) -> str:
    """The Python of a new virtual environment that sees this one's packages, editable ones too."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    outer = sysconfig.get_path("purelib")
    (site / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    return str(folder / "bin/python")


def call(python: str, *arguments: str) -> str:
    """What a command of ``python`` prints; its failure is the test's."""
    variables = {
        k: v for k, v in os.environ.items() if not k.startswith(("TREADLE_", "PYTEST_", "PYTHON"))
    }
    process = subprocess.run(
        [python, *arguments],
        env=variables,
        cwd=Path(python).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    return process.stdout
