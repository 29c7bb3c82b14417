"""Projects to begin a plugin with: plain files with ``string.Template`` marks, one folder a kind.

A file ``NAME.in`` becomes ``NAME``. Every folder holds ``__init__.py.in`` (the hook) and
``test.py.in`` (the conformance test); ``project`` is around all of them.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from weft.errors import ConfigError
from weft.plugins import KINDS
from weft.plugins.entries import normal

__all__ = ("render",)

KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
MORE = {"server": ["weft-server"], "commands": ["typer>=0.21"]}


def render(kind: str, key: str, folder: Path) -> Path:
    """Write a project that provides ``kind:key`` into a new folder of ``folder``; return it.

    Raises ``ConfigError`` for an unknown kind, an impossible key, and a folder that is there.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no plugin kind {kind!r}; known kinds: {', '.join(KINDS)}")
    if not KEY.fullmatch(key):
        raise ConfigError(
            f"the key is {key!r}; it begins with a letter, then letters, digits, '.', '-' and '_'"
        )
    marks = _marks(kind, key)
    project = folder / marks["dist"]
    if project.exists():
        raise ConfigError(f"{project} exists; remove it or choose another name")
    package = project / marks["package"]
    home = files("weft_cli") / "templates"
    for source in _sources(home / "project"):
        _write(project / _name(source), source, marks)
    for source in _sources(home / kind):
        target = package / _name(source)
        if source.name == "test.py.in":
            target = project / "tests" / "test_conformance.py"
        _write(target, source, marks)
    (package / "py.typed").touch()
    return project


def _marks(kind: str, key: str) -> dict[str, str]:
    dist = normal(f"weft-{key}")
    major, minor = version("weft-core").split(".")[:2]
    core = f"weft-core>={major}.{minor},<{major}.{int(minor) + 1}"
    package = dist.replace("-", "_")
    if not package.isidentifier() or keyword.iskeyword(package):
        raise ConfigError(f"the key {key!r} makes no name of a package ({package})")
    return {
        "kind": kind,
        "key": key,
        "dist": dist,
        "package": package,
        "target": f"{package}:Extension" if kind == "extensions" else package,
        "title": "".join(part.title() for part in re.split(r"[-_.]+", key)),
        "core": core,
        "more": "".join(f', "{need}"' for need in MORE.get(kind, ())),
    }


def _sources(folder: Traversable) -> Iterator[Traversable]:
    yield from sorted((f for f in folder.iterdir() if f.name.endswith(".in")), key=lambda f: f.name)


def _name(source: Traversable) -> str:
    return source.name.removesuffix(".in")


def _write(target: Path, source: Traversable, marks: dict[str, str]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    text = source.read_text(encoding="utf-8")
    target.write_text(Template(text).substitute(marks), encoding="utf-8")
