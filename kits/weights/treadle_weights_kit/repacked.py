"""Reads safetensors in which a matrix is several tensors, and brings each into another form.

What a format spreads over tensors in an order of its own becomes the tensors of a layer, in rows of
outputs and columns of inputs, so that the usual rules cut a rank's share out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from treadle.api.files import ModelFiles, SupportsTensorFiles, WeightLoader
from treadle.errors import CheckpointError
from treadle_weights_kit.mapped import SafetensorsLoader

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ("Matrix", "RepackedLoader", "open_repacked")

C = TypeVar("C")
AGAIN = "the file is damaged or is not what config.json says; download it again"


class Files(WeightLoader, SupportsTensorFiles, Protocol):
    """What the tensors are read from, as they are stored."""


class Matrix:
    """The tensors of one matrix, by the last components of their names.

    Every method raises ``CheckpointError`` with the tensor and its file if it is not what was asked for.
    """

    def __init__(self, path: str, tensors: Mapping[str, Tensor], file: str) -> None:
        self.path, self.tensors, self._file = path, tensors, file

    def wrong(self, leaf: str, problem: str) -> CheckpointError:
        """Return the error for a tensor that cannot be right."""
        return CheckpointError(
            f"{self.path}.{leaf} in {self._file} cannot be right: {problem}; {AGAIN}"
        )

    def take(
        self, leaf: str, dtypes: Sequence[torch.dtype], shape: Sequence[int] | None = None
    ) -> Tensor:
        """Return a tensor of one of these types, and of this shape if there is one (-1: any size)."""
        if leaf not in self.tensors:
            raise CheckpointError(f"{self.path} in {self._file} has no {leaf}; {AGAIN}")
        tensor = self.tensors[leaf]
        if tensor.dtype not in dtypes:
            raise self.wrong(leaf, f"it is {tensor.dtype}, and {_listed(dtypes)} is needed")
        if shape is not None and (
            tensor.dim() != len(shape)
            or any(want not in (-1, size) for want, size in zip(shape, tensor.shape, strict=True))
        ):
            raise self.wrong(leaf, f"its shape is {list(tensor.shape)}, not {list(shape)}")
        return tensor

    def number(self, leaf: str, first: int = 0, last: int = 2**31) -> int:
        """Return a whole number that is stored as a tensor."""
        tensor = self.tensors[leaf]
        value = tensor.flatten()[0].item() if tensor.numel() == 1 else None
        if type(value) is not int or not first <= value <= last:
            raise self.wrong(leaf, f"it is {tensor.flatten()[:4].tolist()}, not {first} to {last}")
        return value

    def floats(self, leaf: str, shape: Sequence[int] | None = None) -> Tensor:
        """Return finite numbers in float32."""
        import torch

        tensor = self.take(leaf, (torch.float32, torch.bfloat16, torch.float16), shape).float()
        if not tensor.isfinite().all():
            raise self.wrong(leaf, "some of its numbers are NaN or infinite")
        return tensor

    def scales(self, leaf: str, shape: Sequence[int] | None = None) -> Tensor:
        """Return finite scales in float32: none is negative, and not all are 0."""
        tensor = self.floats(leaf, shape)
        if tensor.numel() and float(tensor.min()) < 0:
            raise self.wrong(leaf, f"a scale is {float(tensor.min()):g}; none may be negative")
        if tensor.numel() and not float(tensor.max()):
            raise self.wrong(leaf, "every scale is 0, so that nothing would be left of the weight")
        return tensor


Convert = Callable[[Matrix], Mapping[str, "Tensor"]]


class RepackedLoader:
    """See ``treadle.api.files.WeightLoader``.

    A matrix is what has a tensor whose last component is one of ``marks``; ``leaves`` also belong to it, and
    ``needed`` says which a matrix must have, by its path. ``convert`` returns its tensors by last component,
    of which ``weight`` is one.
    """

    def __init__(
        self,
        files: Files,
        marks: Sequence[str],
        leaves: Sequence[str],
        needed: Callable[[str], Sequence[str]],
        convert: Convert,
    ) -> None:
        self._files, self._marks, self._convert = files, tuple(marks), convert
        self._leaves, self._needed = frozenset((*leaves, *marks)), needed
        self._first: dict[str, str] = {}
        """By matrix, the name of its first tensor."""

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Raises ``CheckpointError`` with the tensor and the file that cannot be right."""
        matrices = self._matrices()
        self._first = {path: f"{path}.{min(parts)}" for path, parts in matrices.items()}
        wanted = {path for path in matrices if should_load(f"{path}.weight")}

        def is_wanted(name: str) -> bool:
            path, _, leaf = name.rpartition(".")
            if path in matrices and leaf in self._leaves:
                return path in wanted
            return should_load(name)

        seen: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._files.tensors(is_wanted):
            path, _, leaf = name.rpartition(".")
            if path not in wanted or leaf not in self._leaves:
                yield name, tensor
                continue
            parts = seen.setdefault(path, {})
            parts[leaf] = tensor
            if len(parts) == len(matrices[path]):
                file = self._files.file_of(self._first[path])
                repacked = self._convert(Matrix(path, seen.pop(path), file))
                for leaf, part in repacked.items():
                    if leaf == "weight" or should_load(f"{path}.{leaf}"):
                        yield f"{path}.{leaf}", part

    def file_of(self, name: str) -> str:
        path, _, leaf = name.rpartition(".")
        first = self._first.get(path, name) if leaf.startswith("weight") else name
        return self._files.file_of(first)

    def _matrices(self) -> dict[str, set[str]]:
        """Return the tensors that each matrix has, by last component."""
        found: dict[str, set[str]] = {}

        def note(name: str) -> bool:
            path, _, leaf = name.rpartition(".")
            if leaf in self._leaves:
                found.setdefault(path, set()).add(leaf)
            return False

        list(self._files.tensors(note))
        matrices = {path: parts for path, parts in found.items() if parts & {*self._marks}}
        lacking = sorted(
            f"{path}.{leaf}"
            for path, parts in matrices.items()
            for leaf in self._needed(path)
            if leaf not in parts
        )
        if lacking:
            more = ", …" if len(lacking) > 8 else ""
            raise CheckpointError(
                f"the checkpoint has no {', '.join(lacking[:8])}{more}, without which matrices mean "
                "nothing; download it again"
            )
        return matrices


def open_repacked(
    files: ModelFiles,
    loader: Callable[[Files, C | None], RepackedLoader],
    read_config: Callable[[Mapping[str, Any]], C],
) -> RepackedLoader:
    """Open the safetensors of a checkpoint with what its ``quantization_config`` says; ``None``: nothing."""
    stored = files.config.get("quantization_config")
    config = read_config(stored) if isinstance(stored, dict) else None
    return loader(SafetensorsLoader(files), config)


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
