"""Fill in what the ``treadle`` meta-distribution depends on.

In a checkout the members are the sibling folders. In a release (``TREADLE_RELEASE=1``) they are the
distributions of the same version. A member that says ``[tool.treadle] default = false`` is part of
``treadle[all]`` only.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Members(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        files = [root / name / "pyproject.toml" for name in ("core", "server", "cli", "compat")]
        files += sorted(root.glob("kits/*/pyproject.toml"))
        files += sorted(root.glob("plugins/**/pyproject.toml"))
        members = {file.parent: tomllib.loads(file.read_text()) for file in files}
        default = {f: m for f, m in members.items() if wanted(m)}
        metadata["dependencies"] = [requirement(f, m) for f, m in default.items()]
        metadata["optional-dependencies"] = {"all": [requirement(f, m) for f, m in members.items()]}


def wanted(member: dict[str, Any]) -> bool:
    return bool(member.get("tool", {}).get("treadle", {}).get("default", True))


def requirement(folder: Path, member: dict[str, Any]) -> str:
    project = member["project"]
    if os.environ.get("TREADLE_RELEASE") == "1":
        return f"{project['name']}=={project['version']}"
    return f"{project['name']} @ {folder.as_uri()}"
