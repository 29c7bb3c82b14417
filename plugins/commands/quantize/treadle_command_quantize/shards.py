"""Writes safetensors in files of a bounded size, with an index if there are several."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

__all__ = ("SHARD_BYTES", "ShardWriter")

SHARD_BYTES = 4 * 2**30
STEM = "model"


class ShardWriter:
    """Collects tensors and writes a file whenever they reach ``SHARD_BYTES``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._tensors and self._bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        # A copy: tensors may share memory, or lie in a file that is mapped.
        self._tensors[name] = tensor.detach().contiguous().clone()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def close(self) -> int:
        """Write the rest and the index; return the bytes of all tensors."""
        self._write()
        if len(self._names) == 1:
            self._file(0).rename(self._folder / f"{STEM}.safetensors")
            return self._total
        files = [
            f"{STEM}-{i + 1:05}-of-{len(self._names):05}.safetensors"
            for i in range(len(self._names))
        ]
        for index, file in enumerate(files):
            self._file(index).rename(self._folder / file)
        table = {
            name: file for file, names in zip(files, self._names, strict=True) for name in names
        }
        text = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(table.items()))}
        (self._folder / f"{STEM}.safetensors.index.json").write_text(
            json.dumps(text, indent=2) + "\n"
        )
        return self._total

    def _write(self) -> None:
        if self._tensors:
            path = self._file(len(self._names))
            save_file(self._tensors, path, metadata={"format": "pt"})
            # The library lets only its user read the file; a folder says what is usual here.
            path.chmod(self._folder.stat().st_mode & 0o666)
            self._names.append(list(self._tensors))
            self._tensors, self._bytes = {}, 0

    def _file(self, index: int) -> Path:
        return self._folder / f"{STEM}-{index}.partial"
