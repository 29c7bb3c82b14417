"""Tensors in memory, read by the load format of a plugin as if they lay in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from treadle_hqq.loader import hqq_loader
from treadle_quark.config import read_config as read_quark
from treadle_quark.loader import quark_loader
from treadle_torchao.config import read_config as read_torchao
from treadle_torchao.loader import torchao_loader

from quantized_formats import bitsandbytes
from treadle.testing.packing import Format

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


def as_loaded(format: Format, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the load format of a method makes of the tensors, if it has one. Raises what that raises."""
    config = format.config()
    if config["quant_method"] == "bitsandbytes":
        return bitsandbytes.as_loaded(format, tensors)
    loaders: Mapping[str, Callable[[Any], Any]] = {
        "hqq": hqq_loader,
        "quark": lambda files: quark_loader(files, read_quark(config)),
        "torchao": lambda files: torchao_loader(files, read_torchao(config)),
    }
    files = InMemory(tensors)
    loader = loaders.get(config["quant_method"], lambda files: files)(files)
    return dict(loader.tensors(lambda _: True))
