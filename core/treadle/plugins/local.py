"""Plugins without packaging: one Python file named by ``--plugin-file``.

Its keys, ``TREADLE = {"tool_parsers": ["mine"]}``, are read without running it; without them it is an
extension. They replace installed ones as those of ``treadle.overrides`` do.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from treadle.errors import ConfigError
from treadle.plugins.entries import Entry
from treadle.plugins.kinds import check_known, installed_kinds
from treadle.regular_files import read_regular

__all__ = ("local_entries", "module_name")

Declaration = dict[str, list[Annotated[str, msgspec.Meta(min_length=1)]]]


def local_entries(name: str) -> Iterator[Entry]:
    """Yield the keys that the file declares. Raises ``ConfigError`` if it cannot be read."""
    path = Path(name)
    try:
        source = read_regular(path)
    except OSError as error:
        raise ConfigError(
            f"--plugin-file {name} cannot be read: {error.strerror}; give a Python file"
        ) from error
    version = hashlib.sha256(source).hexdigest()[:12]
    for kind, keys in _declaration(name, source).items():
        for key in keys:
            yield Entry(
                kind, key, path.stem, path.name, version, override=True, file=str(path.resolve())
            )


def _declaration(name: str, source: bytes) -> dict[str, list[str]]:
    try:
        tree = ast.parse(source, filename=name)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--plugin-file {name} is not Python: {error}") from error
    for statement in tree.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.AnnAssign):
            target = statement.target
        if isinstance(target, ast.Name) and target.id == "TREADLE":
            return _check_declaration(name, statement.value)  # type: ignore[attr-defined]
    return {"extensions": [Path(name).stem]}


def _check_declaration(name: str, value: ast.expr | None) -> dict[str, list[str]]:
    shape = 'TREADLE must be a literal like {"tool_parsers": ["mine"]}'
    try:
        declaration = msgspec.convert(ast.literal_eval(value or ast.Constant(None)), Declaration)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--plugin-file {name}: {shape}; {error}") from error
    except ValueError as error:
        raise ConfigError(f"--plugin-file {name}: {shape}, not computed") from error
    for kind in declaration:
        check_known(kind, installed_kinds(), f"--plugin-file {name}")
    return declaration


def module_name(entry: Entry) -> str:
    """What the module of a local entry is called in ``sys.modules``."""
    return f"treadle_local_{entry.target}_{entry.version}"
