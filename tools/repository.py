"""What is in this repository: its members, their entry points and their source files.

Everything is found by globbing, so that a new member needs no table to be edited. The tests of the
house style, the packaging tests and ``tools/sync.py`` all look at the tree through this module.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = (
    "ROOT",
    "EntryPoint",
    "Hook",
    "Member",
    "hooks",
    "kits",
    "members",
    "plugins",
    "python_files",
    "shipped",
)

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class EntryPoint:
    """``key`` of ``kind`` is served by ``module``."""

    kind: str
    key: str
    module: str

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.key}"


@dataclass(frozen=True)
class Member:
    """One distribution: a folder with a ``pyproject.toml``, a README and a package."""

    folder: Path

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())

    @property
    def name(self) -> str:
        return str(self.pyproject["project"]["name"])

    @property
    def version(self) -> str:
        return str(self.pyproject["project"]["version"])

    @property
    def package(self) -> Path:
        """The folder that is imported: ``treadle`` for the core, else the name with underscores."""
        return self.folder / (
            "treadle" if self.name == "treadle-core" else self.name.replace("-", "_")
        )

    @property
    def dependencies(self) -> frozenset[str]:
        """The names of the distributions that it needs, without versions and extras."""
        requirements = self.pyproject["project"].get("dependencies", [])
        return frozenset(re.split(r"[<>=!~;\[ ]", need)[0] for need in requirements)

    @property
    def path(self) -> str:
        return self.folder.relative_to(ROOT).as_posix()

    @property
    def entry_points(self) -> list[EntryPoint]:
        """Those of plugins: groups ``treadle.KIND`` or ``treadle.KIND.vN``."""
        groups = self.pyproject["project"].get("entry-points", {})
        return [
            EntryPoint(group.split(".")[1], key, target.partition(":")[0])
            for group, keys in sorted(groups.items())
            if group.startswith("treadle.") and group != "treadle.kinds"
            for key, target in keys.items()
        ]


def kits() -> list[Member]:
    """The members under ``kits/``: libraries that plugins are built on."""
    return [Member(file.parent) for file in sorted(ROOT.glob("kits/*/pyproject.toml"))]


def plugins() -> list[Member]:
    """The members under ``plugins/``, in the order of their paths."""
    return [Member(file.parent) for file in sorted(ROOT.glob("plugins/**/pyproject.toml"))]


def members() -> list[Member]:
    """Core, server, command line, compatibility, every kit and every plugin."""
    fixed = [ROOT / name for name in ("core", "server", "cli", "compat")]
    return [*(Member(f) for f in fixed if (f / "pyproject.toml").is_file()), *kits(), *plugins()]


def shipped(member: Member) -> Iterator[Path]:
    """The Python files that the member installs."""
    yield from sorted(member.package.rglob("*.py"))


def python_files() -> Iterator[Path]:
    """Every Python file of the repository, tests and tools included."""
    for top in (
        "core",
        "server",
        "cli",
        "compat",
        "kits",
        "plugins",
        "tests",
        "tools",
        "benchmarks",
        "docs",
    ):
        yield from sorted((ROOT / top).rglob("*.py"))
    yield from sorted(ROOT.glob("*.py"))


@dataclass(frozen=True)
class Hook:
    """One hook specification: a function decorated with ``@spec``, wherever it is declared."""

    name: str
    arguments: tuple[str, ...]
    signature: str
    doc: str
    group: str
    """The class of specifications that it belongs to."""
    owner: str
    """The distribution that declares and calls it."""


def hooks() -> list[Hook]:
    """Every hook that a plugin may implement, in the order of the source."""
    return [
        hook
        for member in members()
        for path in shipped(member)
        if "HookspecMarker" in (text := path.read_text()) or "hookspecs" in text
        for group in ast.walk(ast.parse(text))
        if isinstance(group, ast.ClassDef)
        for hook in _hooks_of(group, member.name)
    ]


def _hooks_of(group: ast.ClassDef, owner: str) -> Iterator[Hook]:
    for node in group.body:
        if isinstance(node, ast.FunctionDef) and any(map(_is_spec, node.decorator_list)):
            arguments = node.args.args[1:]
            signature = ", ".join(ast.unparse(a) for a in arguments)
            returns = ast.unparse(node.returns) if node.returns else "None"
            yield Hook(
                node.name,
                tuple(a.arg for a in arguments),
                f"{node.name}({signature}) -> {returns}",
                ast.get_docstring(node) or "",
                group.name,
                owner,
            )


def _is_spec(decorator: ast.expr) -> bool:
    marker = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(marker, ast.Name) and marker.id in ("spec", "hookspec")
