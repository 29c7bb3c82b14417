"""Installing a project without pip: what pip would leave in a site folder, from the pyproject."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path


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
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEFT_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": str(site)}


def run_tests(tests: Iterable[Path], site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest on the tests of projects, with ``site`` beside this environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["-o", "asyncio_default_fixture_loop_scope=function", "--import-mode=importlib"]
    return subprocess.run(
        [*command, *options, *map(str, tests)],
        env=environment(site),
        cwd=site,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
