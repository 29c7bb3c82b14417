"""What lies in a checkpoint's folder: for sources, load formats, tokenizers and renderers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError, ConfigError

__all__ = ("BESIDE", "SMALL", "WEIGHTS", "files_in", "matching", "read_json", "template_text")

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


def files_in(root: Path, patterns: Sequence[str], origin: str) -> ModelFiles:
    """Return the files of a folder that match ``patterns``, with its parsed ``config.json``.

    The configuration is empty if there is no ``config.json`` (a folder with only a tokenizer).
    Raises ``CheckpointError`` if the file cannot be read. ``origin`` is for error messages.
    """
    try:
        config = read_json(root / "config.json")
    except CheckpointError as error:
        raise CheckpointError(f"config.json of {origin}: {error}") from error
    names = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    file_names = sorted(n.as_posix() for n in names if not any(p.startswith(".") for p in n.parts))
    return ModelFiles(root=root, names=tuple(matching(file_names, patterns)), config=config)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``; empty if there is no such file. Raises ``CheckpointError``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object")
    return value


def template_text(option: str | None) -> str | None:
    """Return the template that the option ``chat_template`` names: a file's, or the option itself.

    Raises ``ConfigError`` for something that is neither a file nor Jinja.
    """
    if option is None or "{{" in option or "{%" in option or "\n" in option:
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"option chat_template is {option!r}: neither the text of a Jinja template nor a file "
            f"that can be read ({error})"
        ) from error


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match any of the glob ``patterns``, in their order."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
