"""Reads the files of ``torch.save``, tensors only: no code of a checkpoint is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError
from treadle_weights_kit.shards import Shards

__all__ = ("TorchLoader",)


class TorchLoader:
    """A loader of ``torch.save`` files. ``weights_only=True``: runs no code of the checkpoint."""

    def __init__(self, files: ModelFiles) -> None:
        self._shards = Shards(files, "pt", "pytorch_model.bin")

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield requested tensors. Raises ``CheckpointError`` if a file is damaged or unsafe."""
        shards = self._shards
        shards.file_by_tensor.clear()
        for file in shards.names:
            for name, tensor in self._read(shards.path(file)).items():
                if shards.claim(name, file) and should_load(name):
                    yield name, tensor
        shards.check_complete()

    def _read(self, path: Path) -> dict[str, Tensor]:
        try:
            loaded: Any = torch.load(
                path, map_location="cpu", weights_only=True, mmap=_zipped(path)
            )
        except Exception as error:  # pickle raises nearly anything for damaged files
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) cannot be read as PyTorch weights: {error}; "
                "it is damaged, or it contains Python objects, which treadle does not load"
            ) from error
        if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
            loaded = loaded["state_dict"]
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path} contains a {type(loaded).__name__}, not tensors")
        return {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)}

    def file_of(self, name: str) -> str:
        return self._shards.file_of(name)


def _zipped(path: Path) -> bool:
    """Return whether the file is a zip file (torch 1.6 and later), which can be memory-mapped."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"
