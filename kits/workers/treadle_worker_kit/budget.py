"""A bound for the memory that building a model takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from treadle.api.checkpoints import SMALL, matching
from treadle.api.files import ModelFiles
from treadle.errors import CheckpointError
from treadle_worker_kit.memory import machine_bytes

__all__ = ("MemoryBudget",)

# Unpacking two bits into float32 takes 16 bytes for each byte of a file.
GROWTH = 16
SPARE_BYTES = 2**28
FACTORIES = frozenset({
    torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn,
    torch.randint, torch.arange, torch.eye, torch.linspace, torch.Tensor.new_empty,
    torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full,
    torch.empty_like, torch.zeros_like, torch.ones_like,
})  # fmt: skip


def _arange(start: float = 0, end: float | None = None, step: float = 1, **_: Any) -> list[int]:
    first, last = (0, start) if end is None else (start, end)
    return [max(math.ceil((last - first) / (step or 1)), 0)]


def _randn(*shape: Any, size: Any = None, **_: Any) -> Any:
    return size or (shape if isinstance(shape[0], int) else shape[0])


# On the meta device torch computes these in Python and imports sympy, which takes longer than the start of
# a small model. Their shapes, from their arguments.
SHAPES: Mapping[Any, Callable[..., Any]] = {
    torch.arange: _arange,
    torch.eye: lambda n, m=None, **_: (n, n if m is None else m),
    torch.linspace: lambda start, end, steps, **_: (steps,),
    torch.randint: lambda *bounds, size=None, **_: size or bounds[-1],
    torch.randn: _randn,
}


class MemoryBudget(TorchFunctionMode):
    """While it is entered, creating more tensors than the weights explain is a ``CheckpointError``.

    A size in ``config.json`` may be right for a model and wrong for these weights, which would be
    found only when the memory has been taken. Without weight files the machine's memory counts.
    """

    def __init__(self, files: ModelFiles, device: torch.device) -> None:
        super().__init__()
        self._origin = files.root
        small = set(matching(files.names, SMALL))
        self._file_bytes = sum(
            (files.root / name).stat().st_size for name in files.names if name not in small
        )
        self._limit = GROWTH * self._file_bytes + SPARE_BYTES
        if device.type == "cpu":
            memory = machine_bytes()
            self._limit = min(self._limit, memory) if self._file_bytes else memory
        elif not self._file_bytes:
            self._limit = 2**63  # the device refuses what it does not have
        self._used = 0

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in FACTORIES and not _on_meta(args, named):
            self._count(func, args, named)
        return func(*args, **named)

    def _count(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        sizes = {k: v for k, v in named.items() if k not in ("device", "generator", "pin_memory")}
        try:
            if func in SHAPES:
                dtype = sizes.pop("dtype", None) or torch.int64
                tensor = torch.empty(SHAPES[func](*args, **sizes), dtype=dtype, device="meta")
            else:
                tensor = func(*args, **sizes, device="meta")
            self._used += tensor.numel() * tensor.element_size()
        except RuntimeError as error:  # more bytes than a number of 64 bits counts
            raise CheckpointError(
                f"the model of {self._origin} cannot be built: {error}"
            ) from error
        if self._used > self._limit:
            raise CheckpointError(
                f"the model of {self._origin} needs more than {self._used} bytes, a tensor "
                f"{list(tensor.shape)} among them, but its weight files have {self._file_bytes} "
                f"and {self._limit} are allowed; check the sizes in config.json"
            )


def _on_meta(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a factory makes a tensor without memory."""
    device: Any = named.get("device") or getattr(args[0] if args else None, "device", "cpu")
    return torch.device(device).type == "meta"
