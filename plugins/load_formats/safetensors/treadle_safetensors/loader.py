"""Reads safetensors: memory-mapped, so that a rank reads only its shard of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError
from treadle_weights_kit.shards import Shards

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("SafetensorsLoader",)


class SafetensorsLoader:
    """A loader of memory-mapped safetensors: only the parts that are copied are read."""

    def __init__(self, files: ModelFiles) -> None:
        self._shards = Shards(files, "safetensors", "model.safetensors")

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield requested tensors. Raises ``CheckpointError`` if a file is damaged."""
        shards = self._shards
        shards.file_by_tensor.clear()
        for file in shards.names:
            path = shards.path(file)
            try:
                with safe_open(path, framework="pt") as handle:
                    for name in handle.offset_keys():
                        if shards.claim(name, file) and should_load(name):
                            yield name, handle.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} ({path.stat().st_size} bytes) cannot be read as safetensors: {error}; "
                    "it is probably truncated or a Git LFS pointer, download it again"
                ) from error
        shards.check_complete()

    def file_of(self, name: str) -> str:
        return self._shards.file_of(name)
