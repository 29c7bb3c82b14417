"""Write ``core/weft/known_plugins.py`` from the pyprojects of this repository.

python tools/known_plugins.py            write it
python tools/known_plugins.py --check    exit with 1 if it is out of date
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "core" / "weft" / "known_plugins.py"
HEADER = '''"""Which distribution of weft provides which key: for ``install weft-awq`` in messages.

Written by tools/known_plugins.py from the pyprojects of the repository. DO NOT EDIT.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("DISTRIBUTIONS", "KNOWN")

'''


def members(root: Path = ROOT) -> list[Path]:
    """The pyproject of every distribution, plugins last."""
    own = [root / name / "pyproject.toml" for name in ("core", "server", "cli")]
    return [p for p in own if p.exists()] + sorted(root.glob("plugins/*/*/pyproject.toml"))


def render(root: Path = ROOT) -> str:
    """The text of the module."""
    keys: dict[str, str] = {}
    names: set[str] = set()
    for file in members(root):
        project = tomllib.loads(file.read_text())["project"]
        names.add(project["name"])
        for group, points in project.get("entry-points", {}).items():
            parts = group.split(".")
            if parts[0] == "weft" and parts[1] != "overrides":
                keys |= {f"{parts[1]}:{key}": project["name"] for key in points}
    lines = ["KNOWN: Mapping[str, str] = {"]
    lines += [f'    "{key}": "{keys[key]}",' for key in sorted(keys)]
    lines += ["}", "", "DISTRIBUTIONS: frozenset[str] = frozenset(", "    {"]
    lines += [f'        "{name}",' for name in sorted(names)]
    return HEADER + "\n".join([*lines, "    }", ")", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    text = render()
    if parser.parse_args().check:
        return int(not TARGET.exists() or TARGET.read_text() != text)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
