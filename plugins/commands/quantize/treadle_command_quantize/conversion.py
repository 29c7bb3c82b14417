"""From one checkpoint to another: tensors are read, quantized and written one after the other."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treadle.api.checkpoints import SMALL, checked_path, matching, read_json
from treadle.api.files import ModelFiles, WeightLoader
from treadle.api.kinds import LOAD_FORMATS
from treadle.errors import CheckpointError, ConfigError, UnsupportedModelError
from treadle.loading.formats import detect_format
from treadle.plugins import PluginManager
from treadle_command_quantize.layers import Layers
from treadle_command_quantize.rounding import Recipe
from treadle_command_quantize.shards import ShardWriter

__all__ = ("Converted", "convert")

CONFIG = "config.json"
HEAD = "lm_head"
# What says how the weights of the original are stored.
STALE = ("*.index.json", "hf_quant_config.json", CONFIG)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Converted:
    """What was done; ``errors`` are relative, by matrix, and ``left`` are matrices of layers in full."""

    errors: dict[str, float] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    old_bytes: int = 0
    new_bytes: int = 0


def convert(
    plugins: PluginManager,
    files: ModelFiles,
    output: Path,
    recipe: Recipe,
    ignore: Sequence[str] = (),
    *,
    load_format: str = "auto",
    on_matrix: Callable[[str, float], None] = lambda name, error: None,
    on_tensor: Callable[[int], None] = lambda total: None,
) -> Converted:
    """Write ``output``, which appears when it is complete.

    ``on_matrix`` gets the relative error of each matrix, ``on_tensor`` the number of all tensors for each of
    them. Raises ``ConfigError`` for a checkpoint that is quantized already and for what cannot be written,
    ``CheckpointError`` for weights that are no numbers.
    """
    raw = read_json(files.root, CONFIG) or dict(files.config)
    if "quantization_config" in raw or "compression_config" in raw:
        raise ConfigError(
            f"{files.root} is quantized already; give the checkpoint that it was made from"
        )
    layers = Layers(plugins, files, ignore)
    loader = plugins.create_guarded(
        LOAD_FORMATS,
        load_format if load_format != "auto" else str(detect_format(files)),
        files=files,
        seed=0,
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as partial:
            folder = Path(partial, output.name)
            folder.mkdir()
            result = _Conversion(layers, loader, recipe).run(folder, on_matrix, on_tensor)
            config = {**raw, "quantization_config": recipe.config([HEAD, *result.left])}
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            for name in matching(files.names, SMALL):
                path = checked_path(files.root, name)
                if path is not None and not matching([name], STALE):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, folder / name)
            folder.rename(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from error
    return result


class _Conversion:
    """Which tensors of a checkpoint are quantized: all matrices of a layer, or none."""

    def __init__(self, layers: Layers, loader: WeightLoader, recipe: Recipe) -> None:
        self._layers, self._loader, self._recipe = layers, loader, recipe
        self._result = Converted()

    def run(
        self,
        folder: Path,
        on_matrix: Callable[[str, float], None],
        on_tensor: Callable[[int], None],
    ) -> Converted:
        result, writer = self._result, ShardWriter(folder)
        num_tensors = self._count()
        for name, tensor in self._loader.tensors(lambda _: True):
            result.old_bytes += tensor.nbytes
            path = name.removesuffix(".weight")
            if self._is_quantized(name, path, tensor):
                for leaf, part in self._quantize(path, tensor, on_matrix).items():
                    writer.add(f"{path}.{leaf}", part)
            else:
                writer.add(name, tensor)
            on_tensor(num_tensors)
        if not result.errors:
            raise UnsupportedModelError(
                "no matrix of this checkpoint would be quantized; check --ignore and --group-size "
                f"({self._recipe.group or 'none'}), and that its weights are {', '.join(map(str, FLOATS))}"
            )
        result.new_bytes = writer.close()
        return result

    def _count(self) -> int:
        names: list[str] = []

        def refuse(name: str) -> bool:
            names.append(name)
            return False

        list(self._loader.tensors(refuse))
        return len(names)

    def _is_quantized(self, name: str, path: str, tensor: Tensor) -> bool:
        is_left = self._layers.is_left(path) if name.endswith(".weight") else None
        if is_left is None or path == HEAD or tensor.dim() != 2:
            return False
        if not is_left and tensor.dtype in FLOATS and self._recipe.fits(tensor.shape[1]):
            return True
        self._result.left.append(path)
        return False

    def _quantize(
        self, path: str, weight: Tensor, on_matrix: Callable[[str, float], None]
    ) -> dict[str, Tensor]:
        if not weight.isfinite().all():
            raise CheckpointError(
                f"{path}.weight has numbers that are NaN or infinite; download the checkpoint again"
            )
        quantized, numbers = self._recipe.apply(weight), weight.float()
        norm: Any = numbers.norm()
        error = float((quantized.numbers - numbers).norm() / norm) if norm else 0.0
        self._result.errors[path] = error
        on_matrix(path, error)
        return dict(quantized.tensors)
