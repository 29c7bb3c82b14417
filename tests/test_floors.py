"""The packages of the core stand on floors: each imports only from the floors below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

CORE = ROOT / "core/treadle"

# From the ground up, as ARCHITECTURE.md draws it. A package may import from every earlier one.
FLOORS = (
    ("errors",),
    ("option_names", "compat"),
    ("config", "outputs", "known_plugins", "regular_files", "plugin_lock", "plugin_metadata"),
    ("processes",),
    ("api",),
    ("plugins",),
    ("sampling", "cache"),
    ("loading", "text", "structured_output", "scheduler"),
    ("runner",),
    ("engine",),
    ("entrypoints",),
)
ORDER = [package for floor in FLOORS for package in floor]


def package_of(path: Path) -> str:
    """The top-level package or module of the core that ``path`` belongs to."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imported_packages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and top-level package of each import of the core, also under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"treadle.{alias.name}" for alias in node.names]
            names = inner if node.module == "treadle" else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "treadle" and len(parts) > 1:
                yield node.lineno, parts[1]


def test_every_package_has_a_floor() -> None:
    packages = {package_of(p) for p in CORE.rglob("*.py")} - {"__init__", "testing"}
    assert packages == set(ORDER)


def test_no_package_imports_from_a_higher_floor() -> None:
    upward = [
        f"{path.relative_to(ROOT)}:{line} {package_of(path)} imports {package}"
        for path in sorted(CORE.rglob("*.py"))
        if package_of(path) not in ("__init__", "testing")
        for line, package in imported_packages(path)
        if package in ORDER and ORDER.index(package) > ORDER.index(package_of(path))
    ]
    assert upward == []


def test_the_core_does_not_import_its_testing_kit() -> None:
    inward = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(CORE.rglob("*.py"))
        if package_of(path) != "testing"
        for line, package in imported_packages(path)
        if package == "testing"
    ]
    assert inward == []
