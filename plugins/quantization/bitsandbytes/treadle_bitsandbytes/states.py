"""The state of a four-bit matrix: its shape and blocks, and scales that may be quantized themselves.

With double quantization ``absmax`` is uint8. The numbers are then ``nested_quant_map[absmax] · nested_absmax +
nested_offset``, where a ``nested_absmax`` belongs to ``nested_blocksize`` of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, isfinite
from typing import Any

import torch
from torch import Tensor

from treadle.api.checkpoints import parse_json
from treadle.errors import CheckpointError
from treadle_bitsandbytes.blocks import levels
from treadle_bitsandbytes.linear import STEP

__all__ = ("FourBitState",)

STATE = "quant_state.bitsandbytes__"
MAX_BYTES = 2**16
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
WORDS = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
AGAIN = "the file is damaged or was not written by bitsandbytes, download it again"


class FourBitState:
    """What a checkpoint says of one matrix, checked: all of it raises ``CheckpointError``.

    ``parts`` are tensors by what follows the name of the ``matrix``, and ``kind`` is ``nf4`` or ``fp4``.
    """

    def __init__(self, matrix: str, parts: Mapping[str, Tensor], kind: str, file: str) -> None:
        self._matrix, self._parts, self._file = matrix, parts, file
        self._values = self._read(kind)
        self.out, self.inputs, self.block = self._sizes()
        table = self._part("quant_map")
        if not _is_table(table, 16) or not torch.allclose(table.float(), levels(kind), atol=1e-3):
            raise self._wrong("quant_map", f"it is not the table of {kind}")

    def rows(self, stored: Tensor) -> Tensor:
        """Return the run of codes as uint8 ``[out, in / 2]``, a view."""
        is_known = stored.dtype in WORDS
        codes = stored.contiguous().flatten().view(torch.uint8) if is_known else stored
        size = self.out * self.inputs // 2
        if not is_known or codes.numel() != size:
            dtype = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{self._matrix} in {self._file} is {dtype} {list(stored.shape)}, but its quant_state says "
                f"shape {[self.out, self.inputs]}, which is {size} bytes of two numbers; {AGAIN}"
            )
        return codes.view(self.out, -1)

    def row_scales(self) -> Tensor:
        """Return a scale for each row and ``gcd(in, STEP)`` inputs, float32."""
        step, scales = gcd(self.inputs, STEP), self._scales()
        if not self.inputs % self.block:
            return scales.view(self.out, -1).repeat_interleave(self.block // step, dim=1)
        places = torch.arange(self.out * self.inputs // step) * step // self.block
        return scales[places].view(self.out, -1)

    def _read(self, kind: str) -> dict[str, Any]:
        names = [leaf for leaf in self._parts if leaf.startswith(STATE)]
        if names != [f"{STATE}{kind}"]:
            raise CheckpointError(
                f"{self._matrix} in {self._file} has the states {', '.join(names) or 'none'}, but "
                f"quantization_config says {kind}, which needs {STATE}{kind}; {AGAIN}"
            )
        self._name = names[0]
        stored = self._part(self._name)
        if stored.dtype is not torch.uint8 or len(stored) > MAX_BYTES:
            raise self._wrong(self._name, f"it must be JSON of at most {MAX_BYTES} bytes")
        try:
            values = parse_json(bytes(stored.tolist()))
        except ValueError as error:
            raise self._wrong(self._name, f"it is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise self._wrong(self._name, "it is no JSON object")
        return values

    def _sizes(self) -> tuple[int, int, int]:
        match self._values:
            case {"shape": [int(out), int(inputs)], "blocksize": int(block)} if (
                0 < out < 2**31 and 0 < inputs < 2**31 and not inputs % 2 and block in BLOCKS
            ):
                return out, inputs, block
        said = [self._values.get(key) for key in ("shape", "blocksize")]
        raise self._wrong(
            self._name,
            f"it says shape {said[0]!r:.100} and blocksize {said[1]!r:.100}; two sizes, the second one even, "
            f"and one of {', '.join(map(str, BLOCKS))} are needed",
        )

    def _scales(self) -> Tensor:
        """Return those of the blocks, in the order of the numbers."""
        stored, count = self._part("absmax"), -(-self.out * self.inputs // self.block)
        if len(stored) != count:
            raise self._wrong(
                "absmax", f"it has {len(stored)} scales for {count} blocks of {self.block}"
            )
        if stored.dtype is torch.uint8:
            return self._nested(stored)
        if not _are_scales(stored):
            raise self._wrong("absmax", "its scales must be finite and not negative")
        return stored.float()

    def _nested(self, codes: Tensor) -> Tensor:
        nested, table = self._part("nested_absmax"), self._part("nested_quant_map")
        size, offset = self._values.get("nested_blocksize"), self._values.get("nested_offset")
        if type(size) is not int or not 0 < size < 2**31:
            raise self._wrong(self._name, f"it says nested_blocksize {size!r:.100}")
        if not isinstance(offset, int | float) or not isfinite(offset):
            raise self._wrong(self._name, f"it says nested_offset {offset!r:.100}")
        if not _is_table(table, 256):
            raise self._wrong("nested_quant_map", "256 finite numbers are needed")
        needed = -(-len(codes) // size)
        if len(nested) != needed or not _are_scales(nested):
            raise self._wrong(
                "nested_absmax", f"{needed} finite numbers that are not negative are needed"
            )
        spread = nested.float().repeat_interleave(size)[: len(codes)]
        return table.float()[codes.long()].mul_(spread).add_(offset)

    def _part(self, leaf: str) -> Tensor:
        if leaf not in self._parts:
            raise CheckpointError(f"{self._matrix} in {self._file} has no {leaf}; {AGAIN}")
        return self._parts[leaf].flatten()

    def _wrong(self, leaf: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._matrix}.{leaf} in {self._file} cannot be right: {problem}; {AGAIN}"
        )


def _is_table(table: Tensor, size: int) -> bool:
    return len(table) == size and table.is_floating_point() and bool(table.isfinite().all())


def _are_scales(scales: Tensor) -> bool:
    return scales.is_floating_point() and bool((scales.isfinite() & (scales >= 0)).all())
