"""Each Python SDK against a real server, in a process of its own with its own packages."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from install import PACKAGES, folder_of
from process import Process
from servers import KEY, ends_well

pytestmark = pytest.mark.early

SCRIPTS = Path(__file__).with_name("python")
CHECKS = {"chat", "stream", "tools", "structured", "errors", "cancel"}
NAMES = sorted(set(PACKAGES["python"]) - {"schemathesis"})


@pytest.mark.parametrize("name", NAMES)
def test_sdk(name: str, server: Process, tmp_path: Path) -> None:
    folder = folder_of(name)
    if not folder.is_dir() and (name not in ("openai", "anthropic") or find_spec(name) is None):
        pytest.skip(f"{name} is not installed: python tests/sdks/install.py {name}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "HOME": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / f"use_{name}.py"), server.url, KEY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split()) >= CHECKS
    ends_well(server)


def test_every_script_belongs_to_a_package() -> None:
    assert {path.stem for path in SCRIPTS.glob("use_*.py")} == {f"use_{name}" for name in NAMES}
