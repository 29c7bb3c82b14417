"""What lies in a checkpoint's folder: for sources, load formats, tokenizers and renderers.

A checkpoint is data of strangers. Its files are opened here, or by a library after ``checked_path``
has said that they may be.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError, ConfigError
from treadle.regular_files import check_regular, read_regular

__all__ = (
    "BESIDE",
    "SMALL",
    "WEIGHTS",
    "check_folder",
    "checked_path",
    "files_in",
    "matching",
    "parse_json",
    "read_json",
    "read_text",
    "template_text",
)

SMALL: Sequence[str] = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Configuration, tokenizer, chat templates and weight indexes."""

WEIGHTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {"safetensors": ("*.safetensors",), "pt": ("*.bin", "*.pt", "*.pth"), "dummy": ()}
)
"""Load formats and the files that they read; of other formats it is not known."""

BESIDE: Sequence[str] = (
    "consolidated*",
    "original/*",
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "adapter_model*",
    "rng_state*",
)
"""Files that are not a model's weights: copies in another layout, adapters, training state."""

MIB = 2**20
MAX_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "*config.json": 16 * MIB,
        "*.jinja": MIB,
        "*.index.json": 64 * MIB,
        **{pattern: 128 * MIB for pattern in SMALL if pattern != "*.jinja"},
    }
)
"""Largest size of a file by its name; the first pattern counts. Weights have no limit."""

MAX_DEPTH = 64
MAX_ENTRIES = 100_000


def files_in(root: Path, patterns: Sequence[str], origin: str) -> ModelFiles:
    """Return the files of a folder that match ``patterns``, with its parsed ``config.json``.

    The configuration is empty if there is no ``config.json`` (a folder with only a tokenizer).
    Raises ``CheckpointError`` if the file cannot be read. ``origin`` is for error messages.
    """
    try:
        config = read_json(root, "config.json")
    except CheckpointError as error:
        raise CheckpointError(f"config.json of {origin}: {error}") from error
    names = sorted(matching(list(_entries(root)), patterns))
    return ModelFiles(root, tuple(name for name in names if (root / name).is_file()), config)


def check_folder(files: ModelFiles) -> None:
    """Check every file that something may open, by its name, with ``checked_path``.

    These are the files that a source lists, and those that transformers might look for. Raises
    ``CheckpointError`` for the first one that must not be opened.
    """
    patterns = [*SMALL, *(pattern for group in WEIGHTS.values() for pattern in group)]
    present = matching(list(_entries(files.root)), patterns)
    for name in dict.fromkeys((*present, *files.names)):
        checked_path(files.root, name)


def checked_path(root: Path, name: str) -> Path | None:
    """Return the path of a checkpoint's file that may be opened; ``None`` if there is no such file.

    It is a regular file in ``root``, and not larger than files of its kind are. A link may lead
    elsewhere only in the hub's cache, whose snapshots are links to blobs. Raises ``CheckpointError``.
    """
    path = root / name
    limit = next((size for pattern, size in MAX_BYTES.items() if fnmatch(name, pattern)), None)
    try:
        if not os.path.lexists(path):
            return None
        home, target = Path(os.path.realpath(root)), Path(os.path.realpath(path, strict=True))
        hubs = (folder.parent for folder in home.parents if folder.name == "snapshots")
        if not (target.is_relative_to(home) or target.parent in (hub / "blobs" for hub in hubs)):
            raise CheckpointError(
                f"{path} is a link to {target}, outside of the checkpoint's folder; copy the file "
                "into the folder"
            )
        check_regular(target, limit)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error
    return path


def read_json(root: Path, name: str) -> dict[str, Any]:
    """Return the object in a checkpoint's file; empty if there is no such file.

    Raises ``CheckpointError``, also for what JSON readers understand differently.
    """
    data = _read(root, name)
    if data is None:
        return {}
    try:
        value = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"cannot read {root / name}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{root / name} holds {type(value).__name__}, not an object")
    return value


def read_text(root: Path, name: str) -> str | None:
    """Return the text of a checkpoint's file, ``None`` if there is none. Raises ``CheckpointError``."""
    data = _read(root, name)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot read {root / name}: {error}") from error


def parse_json(data: bytes) -> Any:
    """Parse JSON that has one meaning: no key twice in an object, and numbers only.

    Raises ``ValueError``.
    """
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite
        )
        _check_depth(value)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from error
    return value


def template_text(option: str | None) -> str | None:
    """Return the template that the option ``chat_template`` names: a file's, or the option itself.

    Raises ``ConfigError`` for something that is neither a file nor Jinja.
    """
    if option is None or "{{" in option or "{%" in option or "\n" in option:
        return option
    try:
        return read_regular(Path(option).expanduser(), MAX_BYTES["*.jinja"]).decode()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"option chat_template is {option!r}: neither the text of a Jinja template nor a file "
            f"that can be read ({_reason(error)})"
        ) from error


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match any of the glob ``patterns``, in their order."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def _entries(root: Path) -> Iterator[str]:
    """Yield what lies in a folder and below, without folders, hidden things and linked folders."""
    count = 0
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        count += len(names) + len(folders)
        if count > MAX_ENTRIES:
            raise CheckpointError(
                f"{root} holds more than {MAX_ENTRIES} files; give the folder of one checkpoint"
            )
        for name in names:
            if not name.startswith("."):
                yield Path(folder, name).relative_to(root).as_posix()


def _read(root: Path, name: str) -> bytes | None:
    path = checked_path(root, name)
    limit = next(size for pattern, size in MAX_BYTES.items() if fnmatch(name, pattern))
    try:
        return None if path is None else read_regular(path, limit)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {twice!r:.80} twice; keep one of them")
    return table


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"a number is {text:.80}; a finite one is needed")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [v for v in level if isinstance(v, dict | list)]
        if not inner:
            return
        level = [item for v in inner for item in (v.values() if isinstance(v, dict) else v)]
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
