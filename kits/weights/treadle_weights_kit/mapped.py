"""Reads safetensors: memory-mapped, so that a rank reads only its shard of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError
from treadle_weights_kit.headers import MAX_TENSORS, TensorHeader, read_header
from treadle_weights_kit.shards import Shards

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("SafetensorsLoader",)


class SafetensorsLoader:
    """A loader of memory-mapped safetensors: only the parts that are copied are read."""

    treadle_maps_files = True  # its tensors are the files' pages

    def __init__(self, files: ModelFiles) -> None:
        self._shards = Shards(files, "safetensors", "model.safetensors")
        self._headers: dict[str, dict[str, TensorHeader]] = {}

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield requested tensors. Raises ``CheckpointError`` if a file is damaged.

        A file is not opened if none of its tensors is requested; its header is always checked.
        """
        shards = self._shards
        shards.file_by_tensor.clear()
        for file in shards.names:
            header = self._header(file)
            claimed = [name for name in header if shards.claim(name, file)]
            names = [name for name in claimed if should_load(name)]
            if not names:
                continue
            path = shards.path(file)
            try:
                with safe_open(path, framework="pt") as handle:
                    for name in names:
                        yield name, handle.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} ({path.stat().st_size} bytes) cannot be read as safetensors: {error}; "
                    "it is probably truncated or a Git LFS pointer, download it again"
                ) from error
        shards.check_complete()

    def file_of(self, name: str) -> str:
        return self._shards.file_of(name)

    def _header(self, file: str) -> dict[str, TensorHeader]:
        if file not in self._headers:
            self._headers[file] = read_header(self._shards.root, file)
            num_tensors = sum(map(len, self._headers.values()))
            if num_tensors > MAX_TENSORS:
                raise CheckpointError(
                    f"{self._shards.root} has {num_tensors} tensors in {len(self._headers)} files; "
                    f"a checkpoint may have {MAX_TENSORS}"
                )
        return self._headers[file]
