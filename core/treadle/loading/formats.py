"""File formats of weights: ``safetensors``, ``pt`` (``torch.save``) and ``dummy`` (random)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from treadle.api.files import ModelFiles, WeightLoader
from treadle.api.hookspecs import Options, impl
from treadle.errors import CheckpointError
from treadle.loading.sources import BESIDE

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = (
    "SMALL",
    "WEIGHTS",
    "DummyLoader",
    "SafetensorsLoader",
    "TorchLoader",
    "detect_format",
    "treadle_load_format",
)

SMALL: Sequence[str] = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
"""Configuration, tokenizer, chat templates and weight indexes."""

WEIGHTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {"safetensors": ("*.safetensors",), "pt": ("*.bin", "*.pt", "*.pth"), "dummy": ()}
)


@impl
def treadle_load_format(
    format: str, files: ModelFiles, seed: int, options: Options
) -> WeightLoader | None:
    """Open the weights of a checkpoint."""
    if format == "safetensors":
        return SafetensorsLoader(files)
    if format == "pt":
        return TorchLoader(files)
    if format == "dummy":
        return DummyLoader(int(options.get("seed", seed)))
    return None


def detect_format(files: ModelFiles) -> str | None:
    """Return ``safetensors`` if there are any, else ``pt``; ``None`` if there are no weights."""
    for name in ("safetensors", "pt"):
        if _weight_files(files, name):
            return name
    return None


def _weight_files(files: ModelFiles, format: str) -> list[str]:
    patterns = WEIGHTS[format]
    found = [n for n in files.names if any(fnmatch(n, p) for p in patterns)]
    own = [n for n in found if not any(fnmatch(n, p) for p in BESIDE)]
    top = [n for n in own or found if "/" not in n]
    return top or own or found


class _Shards:
    """The weight files and the file of each tensor, from an index or from reading every file."""

    def __init__(self, files: ModelFiles, format: str, whole: str, indexes: Sequence[str]) -> None:
        self.root = files.root
        index = next((i for i in indexes if (files.root / i).is_file()), None)
        self.index: dict[str, str] | None = _index(files.root / index) if index else None
        if self.index is not None:
            self.names = sorted(set(self.index.values()))
        elif whole in files.names:
            self.names = [whole]
        else:
            self.names = _weight_files(files, format)
        if not self.names:
            raise CheckpointError(f"{files.root} has no weights in the format {format!r}")
        for name in self.names:
            if not (self.root / name).is_file():
                raise CheckpointError(
                    f"the shard {name}, listed in {index}, is missing from {self.root}; "
                    "download the checkpoint again"
                )
        self.homes: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.root / name

    def claim(self, tensor: str, file: str) -> bool:
        """Record the file of a tensor. Return ``False`` if the index lists another file."""
        if self.index is not None and self.index.get(tensor, file) != file:
            return False
        if tensor in self.homes:
            raise CheckpointError(
                f"the tensor {tensor} is both in {self.homes[tensor]} and in {file} of "
                f"{self.root}; the folder seems to contain two checkpoints"
            )
        self.homes[tensor] = file
        return True

    def check_complete(self) -> None:
        """Raise ``CheckpointError`` if tensors of the index are in no file."""
        missing = sorted(set(self.index or ()) - set(self.homes))
        if missing:
            raise CheckpointError(
                f"{_some(missing)} listed in the index of {self.root}, but not in the shard "
                f"{(self.index or {})[missing[0]]}; download the checkpoint again"
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more tensors are" if len(names) > 3 else " is"
    return ", ".join(names[:3]) + more


def _index(path: Path) -> dict[str, str]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(v, str) for v in table.values()):
            raise TypeError("weight_map must map names to files")
        for name in set(table.values()):
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"weight_map points outside the checkpoint: {name!r}")
        return dict(table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the weight index {path} cannot be read: {error!r}") from error


class SafetensorsLoader:
    """A loader of memory-mapped safetensors: only the parts that are copied are read."""

    def __init__(self, files: ModelFiles) -> None:
        self._shards = _Shards(
            files, "safetensors", "model.safetensors", ("model.safetensors.index.json",)
        )

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield requested tensors. Raises ``CheckpointError`` if a file is damaged."""
        from safetensors import SafetensorError, safe_open

        shards = self._shards
        shards.homes.clear()
        for file in shards.names:
            path = shards.path(file)
            try:
                with safe_open(path, framework="pt") as opened:
                    for name in opened.offset_keys():
                        if shards.claim(name, file) and wanted(name):
                            yield name, opened.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} ({path.stat().st_size} bytes) cannot be read as safetensors: {error}; "
                    "it is probably truncated or a Git LFS pointer, download it again"
                ) from error
        shards.check_complete()

    def where(self, name: str) -> str:
        return str(self._shards.path(self._shards.homes.get(name, "")))


class TorchLoader:
    """A loader of ``torch.save`` files. ``weights_only=True``: runs no code of the checkpoint."""

    def __init__(self, files: ModelFiles) -> None:
        self._shards = _Shards(files, "pt", "pytorch_model.bin", ("pytorch_model.bin.index.json",))

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield requested tensors. Raises ``CheckpointError`` if a file is damaged or unsafe."""
        shards = self._shards
        shards.homes.clear()
        for file in shards.names:
            for name, tensor in self._read(shards.path(file)).items():
                if shards.claim(name, file) and wanted(name):
                    yield name, tensor
        shards.check_complete()

    def _read(self, path: Path) -> dict[str, Tensor]:
        import torch

        try:
            loaded: Any = torch.load(
                path, map_location="cpu", weights_only=True, mmap=_zipped(path)
            )
        except Exception as error:  # pickle raises nearly anything for damaged files
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) cannot be read as PyTorch weights: {error}; "
                "it is damaged, or it contains Python objects, which treadle does not load"
            ) from error
        if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
            loaded = loaded["state_dict"]
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path} contains a {type(loaded).__name__}, not tensors")
        return {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)}

    def where(self, name: str) -> str:
        return str(self._shards.path(self._shards.homes.get(name, "")))


def _zipped(path: Path) -> bool:
    """Return whether the file is a zip file (torch 1.6 and later), which can be memory-mapped."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


class DummyLoader:
    """A loader of random weights, which reads no files."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def fill(self, model: nn.Module) -> None:
        from treadle.loading.dummy import fill_randomly

        fill_randomly(model, self.seed)
