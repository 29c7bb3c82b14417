"""Build the documentation into a folder, and check what the builder does not.

python tools/site_builder.py [FOLDER]     default: site

Zensical aborts at a link to a page or a heading that does not exist. This adds: no page needs
another host, every image and script exists, addresses of former pages lead to the new ones, each
page lies beside its Markdown, and ``llms.txt`` lists them all. See docs/adr/0019-zensical.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

__all__ = ("build", "problems")

SOURCES = (
    "docs",
    "deploy",
    "tools/theme",
    "mkdocs.yml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
RESOURCE = re.compile(r'<(?:img|script|source|link|iframe)\b[^>]*?\s(?:src|href)="?([^">\s]+)')
FOREIGN = re.compile(r"(?:https?:)?//")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STUB = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<link rel="canonical" href="{0}"><meta http-equiv="refresh" content="0; url={0}"></head>
<body><p>This page is now <a href="{0}">here</a>.</p></body></html>
"""


def build(target: Path) -> list[str]:
    """Write the site to ``target``, which is emptied first. Return what is wrong with it.

    Raises ``RuntimeError`` with the messages of the builder if it aborts.
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)  # the builder writes its cache and its site beside the configuration
        for name in SOURCES:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name)
            else:
                shutil.copy(ROOT / name, copy / name)
        result = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"],
            cwd=copy,
            env={**os.environ, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise RuntimeError(COLOUR.sub("", result.stdout + result.stderr))
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(copy / "site", target)
    pages = sorted((ROOT / "docs").rglob("*.md"))
    redirect(target)
    publish_sources(target, pages)
    return list(problems(target))


def redirect(site: Path) -> None:
    """Write a stub at each address of ``docs/data/moved.toml`` that leads to the new one."""
    addresses = tomllib.loads((ROOT / "docs/data/moved.toml").read_text())["moved"]
    for old_address, new_address in addresses.items():
        page = site / old_address / "index.html"
        if page.exists():
            raise RuntimeError(
                f"docs/data/moved.toml: {old_address} is a page again; remove the entry"
            )
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(STUB.format("../" * len(Path(old_address).parts) + new_address + "/"))


def publish_sources(site: Path, pages: list[Path]) -> None:
    """Copy each page's Markdown beside it, and list all of them in ``llms.txt``."""
    lines = ["# treadle\n", "> An LLM inference engine assembled from plugins.\n"]
    for page in pages:
        name = page.relative_to(ROOT / "docs").as_posix()
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, site / name)
        title = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
        lines.append(f"- [{title[1] if title else name}]({name})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def problems(site: Path) -> Iterator[str]:
    """Yield each resource of the site that another host would serve, or that does not exist."""
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site).as_posix()
        for address in sorted(set(RESOURCE.findall(page.read_text()))):
            if address.startswith("data:"):
                continue
            if FOREIGN.match(address):
                yield f"{name} needs another host: {address}"
            elif not exists(site, page, re.split("[?#]", address)[0]):
                yield f"{name} names what does not exist: {address}"


def exists(site: Path, page: Path, address: str) -> bool:
    target = site / address.lstrip("/") if address.startswith("/") else page.parent / address
    return target.is_file() or (target / "index.html").is_file()


def main(arguments: list[str]) -> int:
    target = Path(arguments[0]) if arguments else ROOT / "site"
    try:
        errors = build(target)
    except RuntimeError as error:
        print(error)
        return 1
    for problem in errors:
        print(problem)
    print(f"{target}: {len(list(target.rglob('index.html')))} pages")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
