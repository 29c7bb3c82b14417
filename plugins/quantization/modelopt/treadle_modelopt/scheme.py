"""What ModelOpt says about a checkpoint, and what it means for the layers.

``FP8``: float8_e4m3fn ``weight`` with a scalar ``weight_scale``; per channel with one for each output.
``NVFP4``: uint8 ``weight`` of two numbers a byte, float8_e4m3fn ``weight_scale`` for 16 inputs each, and a
scalar ``weight_scale_2`` that multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle.errors import CheckpointError, UnsupportedModelError
from treadle_fp8_kit.scaled_mm import ScaledMM
from treadle_layers_kit.schemes import LinearScheme, check_method, listed_names, stored_alike
from treadle_layers_kit.small_floats import Fp4Linear, Fp8Linear

__all__ = ("Config", "ModelOptScheme", "read_config")

METHODS = ("modelopt", "modelopt_fp4")
FP8, CHANNEL, NVFP4, MIXED = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION"
ALGORITHMS = (FP8, CHANNEL, NVFP4)
HEAD = "lm_head"
# Scales of activations, which stay in the model's type, and of what is not cached.
UNUSED = ("input_scale", "output_scale", "q_scale", "pre_quant_scale")
CACHED = ("k_proj", "v_proj", "qkv_proj")


@dataclass(frozen=True, slots=True)
class Config:
    """``layers`` are the algorithms of matrices by name, which replace ``algorithm``."""

    algorithm: str | None
    layers: Mapping[str, str]
    excluded: tuple[str, ...]
    group_size: int = 16

    def algorithm_of(self, name: str) -> str | None:
        """Return how the matrix of this name is stored; ``None``: as it is."""
        if any(_names(pattern, name) for pattern in self.excluded):
            return None
        return self.layers.get(name, None if name == HEAD else self.algorithm)


def read_config(checkpoint: Mapping[str, Any]) -> Config:
    """Read ``quantization_config``, or the content of ``hf_quant_config.json``.

    Raises ``ConfigError`` if the checkpoint is another's, ``UnsupportedModelError`` for a variant that
    this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    check_method(checkpoint, *METHODS)
    values = checkpoint.get("quantization") or checkpoint
    if not isinstance(values, Mapping):
        raise CheckpointError("quantization in hf_quant_config.json is not an object")
    algorithm = str(values.get("quant_algo")).upper()
    excluded = listed_names(values, "exclude_modules") or listed_names(values, "ignore")
    group_size = values.get("group_size") or 16
    if type(group_size) is not int or group_size < 1:
        raise CheckpointError(f"group_size is {group_size!r}; it must be a positive number")
    layers = {}
    if algorithm == MIXED:
        table = values.get("quantized_layers") or {}
        if not isinstance(table, Mapping) or not all(
            isinstance(v, Mapping) for v in table.values()
        ):
            raise CheckpointError("quantized_layers is not an object of layers")
        layers = {name: _known(str(v.get("quant_algo")).upper()) for name, v in table.items()}
        return Config(None, layers, excluded, group_size)
    return Config(_known(algorithm), layers, excluded, group_size)


def _known(algorithm: str) -> str:
    if algorithm not in ALGORITHMS:
        raise UnsupportedModelError(
            f"the checkpoint says quant_algo {algorithm!r}; treadle-modelopt reads "
            f"{', '.join((*ALGORITHMS, MIXED))}"
        )
    return algorithm


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern names a matrix or a module that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


class ModelOptScheme(LinearScheme):
    """Also ``SupportsWeightRenaming``: scales of activations are not read."""

    name = "modelopt"

    def __init__(self, config: Config, device: DeviceInfo) -> None:
        self.config = config
        self._fp8 = ScaledMM(device)

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        match stored_alike(spec, self.config.algorithm_of):
            case "FP8":
                return Fp8Linear("tensor", product=self._fp8)
            case "FP8_PER_CHANNEL_PER_TOKEN":
                return Fp8Linear("channel", product=self._fp8)
            case "NVFP4":
                return Fp4Linear(self.config.group_size, "weight", "weight_scale_2")
        return None

    def rename(self, name: str) -> str | None:
        path, _, leaf = name.rpartition(".")
        if leaf == "output_scale" and path.endswith(CACHED):
            return name
        return None if leaf in UNUSED else name
