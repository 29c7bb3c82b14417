"""The linear layers of a GGUF file: each matrix has blocks of a type of its own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError, ConfigError, UnsupportedModelError
from treadle_gguf.blocks import damage, dequantize, levels
from treadle_gguf.packing import pack_blocks, rows_of_blocks
from treadle_gguf.types import FLOATS, TYPES
from treadle_layers_kit import Shard, Sharded, empty_weight, set_shards
from treadle_layers_kit.dequantized import REPACKED, DequantizedLinear
from treadle_layers_kit.packed import NumbersPart, PackedParts
from treadle_layers_kit.row_packing import RowPacking
from treadle_layers_kit.schemes import LinearScheme

__all__ = ("GgufLinear", "GgufScheme")

HEAD = "lm_head"


class GgufScheme(LinearScheme):
    """Also ``SupportsWeightRenaming``: matrices that a layer fuses may have different types, so that
    each is a module of the layer."""

    name = "gguf"

    def __init__(self, types: Mapping[str, str | None], file: str) -> None:
        """``types`` are those of the matrices by their names, and ``*`` of all others but the head."""
        self.types, self.file = types, file
        self._homes: dict[str, str] = {}

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> GgufScheme:
        """Read what the model source has written. Raises ``ConfigError``, ``UnsupportedModelError``."""
        method = checkpoint.get("quant_method", "gguf")
        types, file = checkpoint.get("types"), checkpoint.get("file")
        if method != "gguf" or not isinstance(types, Mapping) or not isinstance(file, str):
            state = f"is quantized with {method!r}" if checkpoint else "is not quantized"
            raise ConfigError(
                f"option quantization is 'gguf', but this checkpoint {state}; give the .gguf file as the "
                "model and leave the option out"
            )
        if unknown := [type for type in types.values() if type not in (*TYPES, None)]:
            raise UnsupportedModelError(
                f"{file} has tensors of the type {unknown[0]!r}; treadle-gguf reads {', '.join(TYPES)}"
            )
        return cls(types, file)

    def linear_method(self, spec: LinearSpec) -> GgufLinear | None:
        types = [self._type(name) for name in spec.names]
        if not any(types):
            return None
        for name in spec.names:
            self._homes[name] = f"{spec.prefix}.{name.rpartition('.')[2]}"
        if missing := [n for n, type in zip(spec.names, types, strict=True) if type is None]:
            raise UnsupportedModelError(
                f"{self.file} has {', '.join(spec.names)}, which {spec.prefix} fuses, but says no type of "
                f"{', '.join(missing)}"
            )
        return GgufLinear(tuple(str(type) for type in types), spec.names, self.file)

    def _type(self, name: str) -> str | None:
        other = None if name == HEAD else self.types.get("*")
        return self.types.get(name, other)

    def rename(self, name: str) -> str:
        path, _, leaf = name.rpartition(".")
        home = self._homes.get(path)
        return f"{home}.weight" if home is not None and leaf == "weight" else name


class GgufLinear(DequantizedLinear):
    """A module for each matrix, whose ``weight`` is uint8 ``[out, blocks, bytes of a block]``, or numbers.

    Where kernels take the device, matrices that follow each other in one type become one packed weight.
    """

    def __init__(self, types: tuple[str, ...], names: tuple[str, ...], file: str) -> None:
        self.types, self.names, self.file = types, names, file
        self.parts = tuple(name.rpartition(".")[2] for name in names)

    def register(self, module: nn.Module, out: int) -> None:
        outputs = (
            module.outputs
            if isinstance(module, Sharded)
            else tuple(Shard.full(size) for size in self.sizes)
        )
        for part, type, shard in zip(self.parts, self.types, outputs, strict=True):
            block, size = TYPES[type]
            if self.inputs.total % block:
                raise CheckpointError(
                    f"{self.prefix} has {self.inputs.total} input features, which blocks of {block} "
                    f"({type}) do not divide"
                )
            if self.inputs.size % block:
                raise ConfigError(
                    f"{self.prefix} has {self.inputs.size} input features on each rank, which cut through "
                    f"blocks of {block} ({type}); choose a smaller tensor_parallel_size"
                )
            is_float = type in FLOATS
            shape = (shard.size, self.inputs.size // block, size)[: 2 if is_float else 3]
            weight = empty_weight(
                shape, self.dtype if is_float else torch.uint8,
                output_dim=0, input_dim=1, input_block=block,
            )  # fmt: skip
            set_shards([weight], (shard,), self.inputs)
            home = nn.Module()
            home.register_parameter("weight", weight)
            module.add_module(part, home)
        floats = {type in FLOATS for type in self.types}
        misfit = "has matrices in full precision and others that are quantized"
        RowPacking(
            module, self.inputs.size, 16, self.dtype, misfit=misfit if len(floats) > 1 else ""
        )
        if any(type.startswith("IQ4") for type in self.types):
            module.register_buffer("levels", levels(), persistent=False)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Refuse scales that are no numbers, or all 0; repack for kernels, if there are any."""
        for part, name, type in zip(self.parts, self.names, self.types, strict=True):
            blocks = module.get_parameter(f"{part}.weight").data
            if type not in FLOATS and (problem := damage(blocks, type)):
                raise CheckpointError(
                    f"{name} in {self.file} has {problem}; the file is damaged, download it again"
                )

        packing = RowPacking.of(module)
        if packing is not None and packing.by_rows:
            self._repack_rows(module)
            return
        pieces = []
        for run in self._runs():
            piece = self._packed(module, *run)
            if piece is None:
                return
            pieces.append(piece)
        self._replace(module, pieces[0] if len(pieces) == 1 else PackedParts(pieces))

    def _repack_rows(self, module: nn.Module) -> None:
        weights = [module.get_parameter(f"{part}.weight").data for part in self.parts]
        if self.types[0] in FLOATS:
            self._replace(module, NumbersPart(torch.cat(weights)))
            return
        pairs = list(zip(weights, self.types, strict=True))
        self._replace(module, rows_of_blocks(pairs, self.inputs.size))

    def _replace(self, module: nn.Module, packed: nn.Module) -> None:
        for part in self.parts:
            delattr(module, part)
        if "levels" in module._buffers:
            del module.levels
        module.add_module(REPACKED, packed)

    def _runs(self) -> list[tuple[str, list[str]]]:
        """Types, and the parts that have one after the other."""
        pairs = zip(self.types, self.parts, strict=True)
        return [
            (type, [part for _, part in run]) for type, run in groupby(pairs, key=itemgetter(0))
        ]

    def _packed(self, module: nn.Module, type: str, parts: list[str]) -> nn.Module | None:
        weights = [module.get_parameter(f"{part}.weight").data for part in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if type in FLOATS:
            return NumbersPart(weight)
        return pack_blocks(weight, type, self.inputs.size, self.dtype)

    def dense(self, module: Any) -> Tensor:
        pieces = []
        for part, type in zip(self.parts, self.types, strict=True):
            weight = getattr(module, part).weight
            if type in FLOATS:
                pieces.append(weight.float())
            else:
                pieces.append(
                    dequantize(weight, type, getattr(module, "levels", weight)).flatten(1)
                )
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
