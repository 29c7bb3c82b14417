"""The header of a GGUF file, checked against the file before anything of it is mapped."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.api.checkpoints import checked_path
from treadle.errors import CheckpointError
from treadle_gguf.types import TYPES, TYPES_BY_NUMBER

__all__ = ("Header", "TensorInfo", "read_header")

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_TENSORS, MAX_VALUES, MAX_ITEMS, MAX_DEPTH = 200_000, 10_000, 4_000_000, 2
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``shape`` is that of torch, the innermost dimension last; ``start`` is a byte of the file."""

    shape: tuple[int, ...]
    type: str
    start: int

    @property
    def num_bytes(self) -> int:
        block, size = TYPES[self.type]
        return math.prod(self.shape) // block * size


@dataclass(frozen=True, slots=True)
class Header:
    """The values of a file by their keys, and its tensors by their names."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Read what a file says of itself. Raises ``CheckpointError`` for one that is damaged."""
    try:
        if checked_path(path.parent, path.name) is None:
            raise ValueError("there is no such file")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(
            f"{path} ({size} bytes) cannot be read as GGUF: {error}; it is probably truncated or a Git "
            "LFS pointer, download it again"
        ) from error


class _Parser:
    """A place in a file, behind which values are read one after the other."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.place = path, data, 0

    def header(self) -> Header:
        if self.data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.place = 4
        version = self.number("<I")
        if version not in VERSIONS:
            raise ValueError(
                f"its version is {version}; 2 and 3 are read, with little-endian numbers"
            )
        num_tensors = self.count("tensors", MAX_TENSORS)
        num_values = self.count("values", MAX_VALUES)
        values = dict((self.string(), self.value(self.number("<I"))) for _ in range(num_values))
        infos = [self.tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self.place // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_name, offset in infos:
            info = TensorInfo(shape, type_name, start + offset)
            if name in tensors:
                raise ValueError(f"it has the tensor {name!r:.200} twice")
            if info.start + info.num_bytes > len(self.data):
                raise ValueError(
                    f"the tensor {name!r:.200} ends at byte {info.start + info.num_bytes}, behind its end"
                )
            tensors[name] = info
        return Header(self.path, values, tensors)

    def tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        name, dims = self.string(), self.number("<I")
        if not 0 < dims <= 4:
            raise ValueError(f"the tensor {name!r:.200} has {dims} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dims))[::-1]
        number, offset = self.number("<I"), self.number("<Q")
        if number not in TYPES_BY_NUMBER:
            raise ValueError(
                f"the tensor {name!r:.200} has the type {number}; treadle-gguf reads {', '.join(TYPES)}"
            )
        type_name = TYPES_BY_NUMBER[number]
        block = TYPES[type_name][0]
        if not all(0 < n < 2**40 for n in shape) or shape[-1] % block:
            raise ValueError(f"the tensor {name!r:.200} is {list(shape)} in blocks of {block}")
        return name, shape, type_name, offset

    def number(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self.data, self.place)
        self.place += struct.calcsize(format)
        return value

    def count(self, what: str, limit: int) -> int:
        value: int = self.number("<Q")
        if value > limit:
            raise ValueError(f"it says that it has {value} {what}; {limit} are allowed")
        return value

    def string(self) -> str:
        length = self.count("bytes in a text", len(self.data) - self.place)
        self.place += length
        return self.data[self.place - length : self.place].decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY and depth < MAX_DEPTH:
            inner = self.number("<I")
            length = self.count("items in a list", min(MAX_ITEMS, len(self.data) - self.place))
            if inner in NUMBERS:
                format = f"<{length}{NUMBERS[inner][1]}"
                values = struct.unpack_from(format, self.data, self.place)
                self.place += struct.calcsize(format)
                return list(values)
            return [self.value(inner, depth + 1) for _ in range(length)]
        if kind not in NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self.number(NUMBERS[kind])
