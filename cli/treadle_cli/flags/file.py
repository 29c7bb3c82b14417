"""``--config FILE.toml`` or ``FILE.yaml``: options by section or flat, under the flags."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.option_names import resolve
from treadle.regular_files import read_regular
from treadle_cli.flags.groups import SECTIONS

__all__ = ("read_file",)

YAML = (".yaml", ".yml")


def read_file(path: Path | None, known_names: Collection[str]) -> dict[str, Any]:
    """The options of a file that this command knows, flat; names may have dashes.

    Sections of other commands are left alone, so that one file can describe a deployment. Raises
    ``ConfigError`` for a file that cannot be read and for an unknown option.
    """
    if path is None:
        return {}
    try:
        text = read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    content = _yaml(path, text) if path.suffix in YAML else _toml(path, text)
    options: dict[str, Any] = {}
    for name, value in content.items():
        if name in SECTIONS and isinstance(value, dict):
            for inner, option in _normalized(value).items():
                if inner in known_names:
                    options[inner] = option
                elif not _is_foreign(name, inner):
                    raise ConfigError(_unknown(path, f"{name}.{inner}", inner, known_names))
        else:
            for option_name, option in _normalized({name: value}).items():
                if option_name not in known_names:
                    raise ConfigError(_unknown(path, name, option_name, known_names))
                options[option_name] = option
    return options


def _toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from error


def _yaml(path: Path, text: str) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"--config {path} is not a YAML mapping of options to values")
    return {name: value for name, value in content.items() if value is not None}


def _normalized(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table under treadle's names, which have underscores."""
    return resolve({name.replace("-", "_"): value for name, value in table.items()})


def _is_foreign(section: str, name: str) -> bool:
    """Whether an option exists in a section that this command has no flags for."""
    from treadle_cli.flags.groups import BENCH, BENCH_SERVE, ENGINE, SAMPLING, server_group

    groups = {g.section: g for g in (*ENGINE, SAMPLING, BENCH, BENCH_SERVE)}
    if section == "server":
        try:
            return name in server_group().names()
        except ModuleNotFoundError:
            return True  # no server here to say what its options are
    return name in groups[section].struct.__struct_fields__


def _unknown(path: Path, label: str, name: str, known_names: Collection[str]) -> str:
    matches = difflib.get_close_matches(name, known_names, n=1)
    hint = (
        f"did you mean {matches[0]!r}?"
        if matches
        else f"known options: {', '.join(sorted(known_names))}"
    )
    return f"{path} has {label}, which is not an option of this command; {hint}"
