"""Weights in several files: which there are, which tensor is in which, and whether all are there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treadle.api.checkpoints import BESIDE, WEIGHTS, checked_path, matching, read_json
from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError

__all__ = ("Shards", "weight_files")

MAX_SHARDS = 4096


class Shards:
    """The weight files and the file of each tensor, from an index or from reading every file."""

    def __init__(self, files: ModelFiles, format: str, file_name: str) -> None:
        """``file_name`` is the name of a single file; with ``.index.json``, of the index of several.

        Raises ``CheckpointError`` if there are no weights, or fewer files than the index lists.
        """
        self.root = files.root
        index = f"{file_name}.index.json"
        self.index = _index(files.root, index)
        if self.index is not None:
            self.names = sorted(set(self.index.values()))
        elif file_name in files.names:
            self.names = [file_name]
        else:
            self.names = weight_files(files, WEIGHTS[format])
        if not self.names:
            raise CheckpointError(f"{files.root} has no weights in the format {format!r}")
        for name in self.names:
            if checked_path(self.root, name) is None:
                raise CheckpointError(
                    f"the shard {name}, listed in {index}, is missing from {self.root}; "
                    "download the checkpoint again"
                )
        self.file_by_tensor: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.root / name

    def claim(self, tensor: str, file: str) -> bool:
        """Record the file of a tensor. Return ``False`` if the index lists another file."""
        if self.index is not None and self.index.get(tensor, file) != file:
            return False
        if tensor in self.file_by_tensor:
            raise CheckpointError(
                f"the tensor {tensor} is both in {self.file_by_tensor[tensor]} and in {file} of "
                f"{self.root}; the folder seems to contain two checkpoints"
            )
        self.file_by_tensor[tensor] = file
        return True

    def file_of(self, tensor: str) -> str:
        """Return the path of the file of a tensor that was claimed."""
        return str(self.path(self.file_by_tensor.get(tensor, "")))

    def check_complete(self) -> None:
        """Raise ``CheckpointError`` if tensors of the index are in no file."""
        missing = sorted(set(self.index or ()) - set(self.file_by_tensor))
        if missing:
            raise CheckpointError(
                f"{_describe_names(missing)} listed in the index of {self.root}, but not in the shard "
                f"{(self.index or {})[missing[0]]}; download the checkpoint again"
            )


def weight_files(files: ModelFiles, patterns: Sequence[str]) -> list[str]:
    """Return the files that match ``patterns`` and hold the model's weights.

    Files in the top folder are preferred to those in others, and any to what lies ``BESIDE``.
    """
    matches = matching(files.names, patterns)
    extras = matching(matches, BESIDE)
    model_files = [n for n in matches if n not in extras]
    top_level = [n for n in model_files or matches if "/" not in n]
    return top_level or model_files or matches


def _describe_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - 3} more tensors are" if len(names) > 3 else " is"
    return ", ".join(names[:3]) + suffix


def _index(root: Path, name: str) -> dict[str, str] | None:
    """Return the file of each tensor, ``None`` if there is no index."""
    if checked_path(root, name) is None:
        return None
    try:
        content = read_json(root, name)
        table = content["weight_map"]
        shards = set(table.values())
        if not all(isinstance(shard, str) for shard in shards):
            raise TypeError("weight_map must map names to files")
        for shard in shards:
            if Path(shard).is_absolute() or ".." in Path(shard).parts:
                raise ValueError(f"weight_map points outside the checkpoint: {shard!r}")
        if len(shards) > MAX_SHARDS:
            raise ValueError(f"weight_map names {len(shards)} files; it may name {MAX_SHARDS}")
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the weight index {root / name} cannot be read: {error!r}"
        ) from error
    return dict(table)
