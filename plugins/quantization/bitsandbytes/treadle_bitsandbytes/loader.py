"""Reads safetensors in which matrices are runs of numbers, each with its state beside it.

A matrix ``X.weight`` of four bits has ``X.weight.absmax``, ``X.weight.quant_map`` and JSON in
``X.weight.quant_state.bitsandbytes__nf4`` (or ``fp4``). Here it becomes ``X.weight`` uint8 ``[out, in / 2]`` and
``X.weight.absmax`` float32 ``[out, in / step]``, so that the usual rules cut a rank's share out of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from treadle.api.files import ModelFiles, SupportsTensorFiles, WeightLoader
from treadle.errors import CheckpointError
from treadle_bitsandbytes.config import Config, read_config
from treadle_bitsandbytes.states import FourBitState
from treadle_weights_kit.mapped import SafetensorsLoader

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("BitsAndBytesLoader",)

STATE = "quant_state"
PART = re.compile(
    rf"(.+\.weight)\.(absmax|quant_map|nested_absmax|nested_quant_map|{STATE}\.bitsandbytes__\w+)"
)
FORMAT = ".weight_format"


class Files(WeightLoader, SupportsTensorFiles, Protocol):
    """What the tensors are read from, as they are stored."""


class BitsAndBytesLoader:
    """See ``treadle.api.files.WeightLoader``."""

    def __init__(self, files: Files, config: Config) -> None:
        self._files, self._config = files, config

    @classmethod
    def open(cls, files: ModelFiles) -> BitsAndBytesLoader:
        """Open the safetensors of a checkpoint, which may be another's that has no such matrix."""
        stored = files.config.get("quantization_config")
        return cls(
            SafetensorsLoader(files), read_config(stored if isinstance(stored, dict) else {})
        )

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Raises ``CheckpointError`` with the tensor and the file that cannot be right."""
        parts = self._parts()

        def is_wanted(name: str) -> bool:
            if name in parts:
                # Both are asked for, so that a layer that is not quantized is reported.
                return should_load(name) | should_load(f"{name}.absmax")
            return PART.fullmatch(name) is None and should_load(name)

        for name, tensor in self._files.tensors(is_wanted):
            if name not in parts:
                yield name, tensor
                continue
            state = FourBitState(name, parts[name], self._config.type, self.file_of(name))
            yield name, state.rows(tensor)
            yield f"{name}.absmax", state.row_scales()

    def file_of(self, name: str) -> str:
        return self._files.file_of(name)

    def _parts(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of each matrix that has one, by the names of its tensors."""
        parts: dict[str, dict[str, Tensor]] = {}

        def is_part(name: str) -> bool:
            return PART.fullmatch(name) is not None or name.endswith(FORMAT)

        for name, tensor in self._files.tensors(is_part):
            if (match := PART.fullmatch(name)) is not None:
                parts.setdefault(match[1], {})[match[2]] = tensor
            elif tensor.numel() != 1 or int(tensor) != 0:
                raise CheckpointError(
                    f"{name} in {self.file_of(name)} is {tensor.flatten()[:4].tolist()}, an order of "
                    "rows that only one kernel reads; save the model anew with bitsandbytes 0.45 or later"
                )
        return parts
