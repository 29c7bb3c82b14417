"""Layers of a model that are alike, of which one is enough to find out which kernels are launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ("repeated_layers",)


@contextmanager
def repeated_layers(model: nn.Module | None) -> Iterator[None]:
    """Let each layer that is like one before it return what that one returned, without running.

    Values are then wrong, but their shapes are right. The first layer of a list and the last always
    run: models treat them otherwise. Without a model, nothing happens.
    """
    skipped: list[nn.Module] = []
    try:
        for layers in _layer_lists(model) if model is not None else ():
            first: dict[object, _FirstLayer] = {}
            for layer in list(layers)[1:-1]:
                kind = _kind(layer)
                if kind in first:
                    layer.forward = first[kind].last_result
                else:
                    layer.forward = first[kind] = _FirstLayer(layer.forward)
                skipped.append(layer)
        yield
    finally:
        for layer in skipped:
            del layer.forward


class _FirstLayer:
    """The ``forward`` of the first layer of a kind; keeps what it returned."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._result: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._result = self._forward(*args, **options)
        return self._result

    def last_result(self, *args: Any, **options: Any) -> Any:
        """Return what the layer returned last, whatever the arguments."""
        return self._result


def _layer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield the outermost lists of modules: those of layers, not those of experts in a layer."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _layer_lists(child)


def _kind(layer: nn.Module) -> object:
    """Return what layers have in common that launch the same kernels."""
    return (
        tuple((name, type(m), getattr(m, "attn_group", None)) for name, m in layer.named_modules()),
        tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters()),
    )
