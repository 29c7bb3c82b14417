"""The header of a safetensors file, checked against the file before a library maps it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.api.checkpoints import checked_path, parse_json
from treadle.errors import CheckpointError

__all__ = ("MAX_HEADER_BYTES", "MAX_TENSORS", "TensorHeader", "read_header")

MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 500_000
"""Tensors of a checkpoint, all files together."""

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a header says of a tensor; ``offsets`` are its first byte and the one after its last."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_header(root: Path, name: str) -> dict[str, TensorHeader]:
    """Return the tensors of a file in its order: together they are exactly what the file holds.

    Raises ``CheckpointError`` with the name of the file and of the tensor.
    """
    path = checked_path(root, name)
    if path is None:
        raise CheckpointError(f"{root / name} does not exist")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= size - 8:
                raise ValueError("its header is longer than the file")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes; it may have {MAX_HEADER_BYTES}")
            table = parse_json(file.read(length))
        return _tensors(table, size - 8 - length)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} ({size} bytes) cannot be read as safetensors: {error}; it is probably "
            "truncated or a Git LFS pointer, download it again"
        ) from error


def _tensors(table: Any, num_bytes: int) -> dict[str, TensorHeader]:
    if not isinstance(table, dict):
        raise ValueError("its header is not a JSON object")
    if len(table) > MAX_TENSORS:
        raise ValueError(f"it has {len(table)} tensors; a checkpoint may have {MAX_TENSORS}")
    entries = [(n, _tensor(n, entry)) for n, entry in table.items() if n != "__metadata__"]
    tensors = dict(sorted(entries, key=lambda item: item[1].offsets))
    end = 0
    for name, tensor in tensors.items():
        start, stop = tensor.offsets
        if start != end:
            problem = "overlaps the tensor before it" if start < end else "leaves a gap before it"
            raise ValueError(f"the tensor {name!r:.200} at bytes {start} to {stop} {problem}")
        end = stop
    if end != num_bytes:
        raise ValueError(f"its tensors have {end} bytes, but {num_bytes} follow the header")
    return tensors


def _tensor(name: str, entry: Any) -> TensorHeader:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]} if (
            dtype in BITS and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop))
        ):
            tensor = TensorHeader(dtype, tuple(shape), (start, stop))
        case _:
            raise ValueError(
                f"the tensor {name!r:.200} is described by {entry!r:.200}; a known dtype, a shape "
                "and two data_offsets are needed"
            )
    if (stop - start) * 8 != tensor.num_elements * BITS[dtype]:
        raise ValueError(
            f"the tensor {name!r:.200} is {dtype} {list(shape)!s:.200}, which is not what "
            f"{stop - start} bytes hold"
        )
    return tensor
