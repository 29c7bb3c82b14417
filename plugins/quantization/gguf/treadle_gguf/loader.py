"""Reads the tensors of a GGUF file, mapped into memory, under the names that they have on the hub."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError
from treadle_gguf.blocks import damage, dequantize_rows, levels
from treadle_gguf.names import Place, is_matrix, places
from treadle_gguf.reader import TensorInfo, read_header
from treadle_gguf.source import folder_name
from treadle_gguf.types import FLOATS, TYPES

__all__ = ("GgufLoader",)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufLoader:
    """See ``treadle.api.files.WeightLoader``: quantized matrices come as blocks, all else as numbers."""

    def __init__(self, files: ModelFiles) -> None:
        stored = files.config.get("quantization_config") or {}
        path = Path(str(stored.get("file")))
        # A checkpoint of somebody else might name any file; only what the source has made is believed.
        if not path.is_file() or files.root.name != folder_name(path):
            raise CheckpointError(
                f"load_format is 'gguf', but {files.root} is not made from a GGUF file; give the .gguf "
                "file itself as the model"
            )
        self._config = files.config
        self._header = read_header(path)
        self._levels = levels()

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        architecture = self._header.values["general.architecture"]
        num_experts = int(self._config.get("num_experts", 0))
        data = self._map()
        for stored_name, info in self._header.tensors.items():
            for place in places(architecture, stored_name, num_experts):
                if should_load(place.name):
                    tensor = self._tensor(data, info, place)
                    if info.type not in FLOATS and not is_matrix(stored_name, info):
                        if problem := damage(tensor, info.type):
                            raise CheckpointError(
                                f"{stored_name} in {self._header.path} has {problem}; the file is damaged, "
                                "download it again"
                            )
                        tensor = dequantize_rows(tensor, info.type, self._levels)
                    yield place.name, tensor

    def file_of(self, name: str) -> str:
        return str(self._header.path)

    def _map(self) -> Tensor:
        path = self._header.path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_file(
                str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
            )

    def _tensor(self, data: Tensor, info: TensorInfo, place: Place) -> Tensor:
        block, size = TYPES[info.type]
        stored = data[info.start : info.start + info.num_bytes]
        if info.type in FLOATS:
            if info.start % size:
                stored = stored.clone()
            tensor = stored.view(DTYPES[info.type]).view(info.shape)
        else:
            tensor = stored.view(*info.shape[:-1], info.shape[-1] // block, size)
        if place.item is not None:
            tensor = tensor[place.item]
        if place.heads is not None:
            tensor = _permute(tensor, int(self._config[place.heads]))
        return tensor


def _permute(tensor: Tensor, heads: int) -> Tensor:
    """Rows in the order of rotations by halves, from that of rotations by neighbours."""
    return torch.flatten(tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2), 0, 2)
