"""Write what is derived from the tree; with ``--check`` only say what is stale.

Derived are the members in ``requirements-dev.txt``, the core's table of known plugins, and the
OpenAPI document and the generated blocks of the documentation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import http_api
import known_plugins
from documents import filled
from repository import ROOT, members

__all__ = ("main",)

REQUIREMENTS = ROOT / "requirements-dev.txt"
MEMBER_LINES = re.compile(r"(# members [^\n]*\n).*?\n\n", re.DOTALL)


def requirements(text: str) -> str:
    lines = "\n".join(f"-e ./{member.path}" for member in members())
    return MEMBER_LINES.sub(lambda m: f"{m[1]}{lines}\n\n", text)


def derived() -> Iterator[tuple[Path, str]]:
    """Yield each file that holds something derived, and what it should be."""
    yield REQUIREMENTS, requirements(REQUIREMENTS.read_text())
    yield known_plugins.TARGET, known_plugins.render()
    yield http_api.TARGET, http_api.text()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        yield page, filled(page.read_text())


def main(arguments: list[str]) -> int:
    stale = [(p, text) for p, text in derived() if not p.exists() or p.read_text() != text]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)}: {'stale' if '--check' in arguments else 'written'}")
        if "--check" not in arguments:
            path.write_text(text)
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
