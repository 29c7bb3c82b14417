"""Sources of checkpoints: a local folder (``file``) or the Hugging Face hub (``hf``)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from treadle.api.files import ModelFiles, ModelRef, ModelSource
from treadle.api.hookspecs import impl
from treadle.errors import CheckpointError

__all__ = ("BESIDE", "FolderSource", "HubSource", "files_in", "parse_ref", "treadle_model_source")

SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):(?!\\)(.+)", re.IGNORECASE)

BESIDE = (
    "consolidated*",
    "original/*",
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "adapter_model*",
    "rng_state*",
)
"""Files that are not a model's weights: copies in another layout, adapters, training state."""


@impl
def treadle_model_source(scheme: str) -> ModelSource | None:
    """Return the source ``file`` (a folder) or ``hf`` (the Hugging Face hub)."""
    if scheme == "file":
        return FolderSource()
    if scheme == "hf":
        return HubSource()
    return None


def parse_ref(text: str, revision: str | None = None, download_dir: str | None = None) -> ModelRef:
    """Parse the user's model name.

    An existing folder or a text that looks like a path is a ``file``, ``scheme:path`` has its own
    scheme, and anything else is a name on the hub. Raises ``CheckpointError`` if ``text`` is empty.
    """
    text = text.strip()
    if not text:
        raise CheckpointError(
            "the model is empty; give a folder, a hub name (org/name) or scheme:path"
        )
    folder = Path(text).expanduser()
    if folder.is_dir() or text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return ModelRef("file", str(folder), revision, download_dir)
    if found := SCHEME.fullmatch(text):
        scheme, path = found[1].lower(), found[2]
        if scheme == "file":
            path = str(Path(path.removeprefix("//")).expanduser())
        return ModelRef(scheme, path, revision, download_dir)
    return ModelRef("hf", text, revision, download_dir)


def files_in(root: Path, patterns: Sequence[str], origin: str) -> ModelFiles:
    """Return the files of a folder that match ``patterns``, with its parsed ``config.json``.

    The configuration is empty if there is no ``config.json`` (a folder with only a tokenizer).
    Raises ``CheckpointError`` if the file cannot be read. ``origin`` is for error messages.
    """
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and not _hidden(path.relative_to(root))
    )
    return ModelFiles(
        root=root,
        names=tuple(name for name in names if any(fnmatch(name, p) for p in patterns)),
        config=_config(root / "config.json", origin),
    )


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _config(path: Path, origin: str) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"config.json of {origin} cannot be read ({path}): {error}"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json of {origin} is not a JSON object ({path})")
    return config


class FolderSource:
    """A folder on the local disk."""

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        """Return the folder's files. Raises ``CheckpointError`` if the folder does not exist."""
        root = Path(ref.path).expanduser()
        if not root.is_dir():
            what = "is a file, not a folder" if root.exists() else "does not exist"
            raise CheckpointError(
                f"the model folder {root} {what}; give the folder with config.json, or the "
                "name of a checkpoint on the hub (org/name)"
            )
        return files_in(root, patterns, str(root))


class HubSource:
    """The Hugging Face hub. ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` have their usual meaning."""

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        """Download missing files, with the hub library's progress bars.

        Raises ``CheckpointError`` if the checkpoint does not exist, is gated, or is neither
        reachable nor in the cache.
        """
        import huggingface_hub

        try:
            root = huggingface_hub.snapshot_download(
                ref.path,
                revision=ref.revision,
                cache_dir=ref.download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(BESIDE),
            )
        except Exception as error:  # the hub library raises its own, httpx's and OS errors
            raise CheckpointError(self._failure_reason(ref, error)) from error
        return files_in(Path(root), patterns, ref.path)

    @staticmethod
    def _failure_reason(ref: ModelRef, error: Exception) -> str:
        from huggingface_hub import constants, errors

        name = f"{ref.path!r} at revision {ref.revision!r}" if ref.revision else repr(ref.path)
        if isinstance(error, errors.HFValidationError):
            return (
                f"{ref.path!r} is neither an existing folder nor a hub name (org/name); "
                "check the spelling or the path"
            )
        if constants.HF_HUB_OFFLINE:
            return (
                f"the checkpoint {name} is not in the local cache and HF_HUB_OFFLINE is set; "
                "unset it, download the checkpoint first, or give a folder"
            )
        if isinstance(error, errors.GatedRepoError):
            return (
                f"the checkpoint {name} is gated; accept its licence on the hub and set HF_TOKEN "
                "to a token that may read it"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"the checkpoint {ref.path!r} has no revision {ref.revision!r} on the hub"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"no folder and no hub checkpoint {name} exists, or it is private; check the "
                "spelling, or set HF_TOKEN to a token that may read it"
            )
        return f"the checkpoint {name} could not be downloaded: {type(error).__name__}: {error}"
