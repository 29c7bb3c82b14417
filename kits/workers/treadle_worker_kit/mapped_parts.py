"""Weights that stay mapped: the parts of one parameter, as they come from the file."""

from __future__ import annotations

from torch import Tensor

from treadle_layers_kit import WeightTarget, layout_of
from treadle_layers_kit.mapping import map_parameter, may_map, release_pages
from treadle_worker_kit.shards import load_weight

__all__ = ("MappedParts",)


class MappedParts:
    """Tensors of a mapped file on their way into parameters that may be read from it.

    Fused matrices stay mapped where the file has them one behind the other, in the order of the parameter, and are
    copied where it has not. ``is_mapping``: whether the loader's tensors are pages of a file.
    """

    def __init__(self, is_mapping: bool) -> None:
        self._is_mapping = is_mapping
        self._pending: dict[int, tuple[Tensor, dict[int, tuple[Tensor, WeightTarget]]]] = {}

    def take(self, parameter: Tensor, tensor: Tensor, slot: WeightTarget) -> bool:
        """Take a tensor that fits; ``False``: the caller copies it."""
        if not self._is_mapping or not may_map(parameter, tensor, slot.part):
            return False
        size = max(1, len(layout_of(parameter).outputs))
        _, parts = self._pending.setdefault(id(parameter), (parameter, {}))
        parts[slot.part or 0] = (tensor, slot)
        if len(parts) == size:
            del self._pending[id(parameter)]
            ordered = [parts[index] for index in range(size)]
            if not map_parameter(parameter, [tensor for tensor, _ in ordered]):
                _copy(parameter, ordered)
        return True

    def close(self) -> None:
        """Copy what waits for parts that came in another form."""
        for parameter, parts in self._pending.values():
            _copy(parameter, list(parts.values()))
        self._pending.clear()


def _copy(parameter: Tensor, parts: list[tuple[Tensor, WeightTarget]]) -> None:
    for tensor, slot in parts:
        load_weight(parameter, tensor, slot)
        release_pages(tensor)
