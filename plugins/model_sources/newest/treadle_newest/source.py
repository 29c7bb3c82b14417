"""Looks at a folder that somebody else, a training run for example, keeps adding checkpoints to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.api.checkpoints import files_in, read_json
from treadle.api.types import ModelFiles, ModelRef
from treadle.errors import CheckpointError

__all__ = ("NewestSource", "complete")


class NewestSource:
    """See ``treadle.api.files.ModelSource``.

    A subfolder counts once it is complete: it has a ``config.json``, weights, every shard that its
    index names, and no file that is still being written. The newest is the one changed last. A
    revision is the name of a subfolder.
    """

    def resolve_revision(self, ref: ModelRef) -> str:
        return self._folder(ref).name

    def resolve(self, ref: ModelRef, *, patterns: Sequence[str]) -> ModelFiles:
        return files_in(self._folder(ref), patterns, f"newest:{ref.path}")

    @staticmethod
    def _folder(ref: ModelRef) -> Path:
        root = Path(ref.path).expanduser()
        if not root.is_dir():
            raise CheckpointError(
                f"newest:{ref.path} is not a folder; give the one that holds the checkpoints"
            )
        folders = (f for f in root.iterdir() if ref.revision in (None, f.name))
        checkpoints = [folder for folder in folders if folder.is_dir() and complete(folder)]
        if not checkpoints:
            raise CheckpointError(
                f"newest:{ref.path} holds no complete checkpoint"
                f"{'' if ref.revision is None else f' {ref.revision!r}'} (a folder with config.json, "
                "weights, and every shard of its index)"
            )
        return max(checkpoints, key=lambda f: (_changed(f), f.name))


def complete(folder: Path) -> bool:
    """Whether a checkpoint is all there."""
    names = set(_names(folder))
    if "config.json" not in names or any(n.endswith((".tmp", ".incomplete")) for n in names):
        return False
    index = folder / "model.safetensors.index.json"
    try:
        read_json(folder, "config.json")
        if index.name in names:
            shards = read_json(folder, index.name)["weight_map"].values()
            return names.issuperset(shards)
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return False  # half written
    return any(name.endswith((".safetensors", ".bin", ".pt")) for name in names)


def _names(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir() if path.is_file())


def _changed(folder: Path) -> float:
    return max(path.stat().st_mtime for path in folder.iterdir())
