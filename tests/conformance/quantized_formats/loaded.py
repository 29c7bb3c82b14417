"""Tensors in memory, read by the load format of a plugin as if they lay in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ("FILE", "InMemory", "as_loaded")

FILE = "model.safetensors"


class InMemory:
    """What a loader of safetensors is to the loaders of formats."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, t) for name, t in self._tensors.items() if should_load(name))

    def file_of(self, name: str) -> str:
        assert name in self._tensors, name
        return FILE


def as_loaded(loader: Callable[[Any], Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a load format makes of the tensors. Raises what it raises."""
    return dict(loader(InMemory(tensors)).tensors(lambda _: True))
