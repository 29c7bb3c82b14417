"""Linear layers one at a time, of models whose steps the library does not run as a whole."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from treadle_kernels_native.library import (
    LibraryError,
    choose_instruction_set,
    load_library,
)
from treadle_kernels_native.linear_structs import FORMATS, LinearStructs
from treadle_kernels_native.structs import Linear, Model

__all__ = ("NativeLinears", "destroy")

log = logging.getLogger(__name__)

MAX_ROWS = 512
"""Of one call, ``TN_SLAB`` of the library."""


class NativeLinears:
    """Multiplies by the weights of one layer. Used by one thread at a time.

    It has as many threads as torch, and neither these nor memory before the first call.
    """

    def __init__(self, isa: str = "auto") -> None:
        """``isa`` is the option of the plugin. Raises ``ConfigError`` at the first call if the machine lacks it."""
        self._isa = isa
        self._layers: WeakKeyDictionary[nn.Module, tuple[LinearStructs, Linear]] = (
            WeakKeyDictionary()
        )
        self._library: ctypes.CDLL | None = None
        self._handle: int | None = None
        self._end: Callable[[], object] = lambda: None
        self._most_inputs = 0

    def run(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """``[..., in]`` to ``[..., out]``, without the bias; ``None`` if the library cannot.

        Activations are rounded to eight bits, row by row.
        """
        if not self._has_room(x.shape[-1]):
            return None
        if module not in self._layers:
            structs = LinearStructs()
            self._layers[module] = structs, structs.of(module, has_bias=False)
        return self._product(self._layers[module][1], x)

    def multiply(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """Likewise, with a weight ``[out, in]`` in float32 or bfloat16, for which nothing is rounded to eight bits."""
        if not self._has_room(x.shape[-1]):
            return None
        n, k = weight.shape
        linear = Linear(weight=weight.data_ptr(), n=n, k=k, format=FORMATS[weight.dtype])
        return self._product(linear, x)

    def _product(self, linear: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        y = torch.empty(len(rows), linear.n)
        for first in range(0, len(rows), MAX_ROWS):
            part, out = rows[first : first + MAX_ROWS], y[first:]
            arguments = part.data_ptr(), len(part), out.data_ptr()
            self._library.tn_multiply(self._handle, ctypes.byref(linear), *arguments)  # type: ignore[union-attr]
        return y.to(x.dtype).view(*x.shape[:-1], linear.n)

    def _has_room(self, inputs: int) -> bool:
        """Make the threads and the memory for so many inputs, if there are none yet. Return whether there are."""
        if inputs % 32:
            return False
        if inputs <= self._most_inputs:
            return self._handle is not None
        self._end()
        self._most_inputs, self._handle = inputs, None
        try:
            self._library = library = load_library()
        except LibraryError as error:
            log.warning(
                "layers run in torch, which unpacks quantized weights in each step: %s", error
            )
            self._most_inputs = 2**63
            return False
        # No layers: an engine for its threads, and memory for rows of one linear layer.
        model = Model(hidden=inputs, heads=1, kv_heads=1, head_size=32, intermediate=32)
        model.page_size = 16
        threads = torch.get_num_threads()
        instruction_set = choose_instruction_set(library, self._isa)
        self._handle = library.tn_create(ctypes.byref(model), threads, instruction_set, 0)
        if not self._handle:
            log.warning(
                "layers of %d inputs run in torch: there is no memory, or there are no %d threads",
                inputs,
                threads,
            )
        else:
            self._end = weakref.finalize(self, destroy, library, self._handle, os.getpid())
        return bool(self._handle)


def destroy(library: ctypes.CDLL, engine: int, process: int) -> None:
    """End an engine, unless this is a child that was forked since: it has none of the threads."""
    if os.getpid() == process:
        library.tn_destroy(engine)
