"""What a checkpoint of Quark says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from treadle.errors import CheckpointError, UnsupportedModelError
from treadle_layers_kit.rounded_inputs import Rounding
from treadle_layers_kit.schemes import check_method, listed_names

__all__ = ("Config", "Weights", "read_config")

KEY = "quark"
HEAD = "lm_head"
INTEGERS = ("int4", "uint4", "int8", "uint8")
FP8, FP4 = "fp8_e4m3", "fp4"
SCHEMES = ("per_tensor", "per_channel", "per_group", "per_block")
E8M0 = "e8m0"
LINEAR = ("nn.Linear", "Linear")


@dataclass(frozen=True, slots=True)
class Weights:
    """``dtype`` and ``scheme`` in Quark's words; ``group`` inputs share a scale, 0: all of them."""

    dtype: str
    scheme: str
    group: int = 0
    block: tuple[int, int] = (1, 0)
    rounds_inputs: bool = False
    """Whether activations were to be rounded as the weights are."""
    inputs: Rounding | None = None
    """How they were to be rounded to int8, beside the scales of the file: each row has its own."""

    @property
    def bits(self) -> int:
        """Of an integer."""
        return int(self.dtype[-1])


@dataclass(frozen=True, slots=True)
class Config:
    """``layers`` are patterns in their order, ``None`` in full; ``reorder``: nibbles are interleaved."""

    default: Weights | None
    layers: Mapping[str, Weights | None]
    excluded: tuple[str, ...]
    reorder: bool = True

    def weights(self, name: str) -> Weights | None:
        """How the matrix of this name is stored; ``None``: as it is."""
        if any(_names(pattern, name) for pattern in self.excluded):
            return None
        for pattern, weights in self.layers.items():
            if fnmatchcase(name, pattern):
                return weights
        return None if name == HEAD else self.default


def read_config(checkpoint: Mapping[str, Any]) -> Config:
    """Read a ``quantization_config``.

    Raises ``ConfigError`` if the checkpoint is another's, ``UnsupportedModelError`` for a variant that
    this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    check_method(checkpoint, KEY)
    excluded = listed_names(checkpoint, "exclude")
    export = _object(checkpoint, "export")
    format = export.get("weight_format", "real_quantized")
    if format != "real_quantized":
        raise _unread("export", "weight_format", format, "real_quantized")
    packing = export.get("pack_method", "reorder")
    if packing not in ("reorder", "order"):
        raise _unread("export", "pack_method", packing, "reorder, order")
    algorithms = checkpoint.get("algo_config") or ()
    if "rotation" in str(algorithms).lower() or "quarot" in str(algorithms).lower():
        raise UnsupportedModelError(
            "quantization_config says a rotation in algo_config: treadle does not rotate activations to "
            "match; use a checkpoint without it"
        )
    layers = {
        pattern: _layer(value, f"layer_quant_config.{pattern}")
        for pattern, value in _object(checkpoint, "layer_quant_config").items()
    }
    types = _object(checkpoint, "layer_type_quant_config")
    linear = next((types[name] for name in LINEAR if name in types), None)
    default = linear if linear is not None else checkpoint.get("global_quant_config")
    return Config(_layer(default, "global_quant_config"), layers, excluded, packing == "reorder")


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{key} in quantization_config is {found!r:.200}, not an object")
    return found


def _layer(stored: Any, where: str) -> Weights | None:
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"{where} in quantization_config is {stored!r:.200}, not an object")
    weight = stored.get("weight")
    if weight is None:
        return None
    if isinstance(weight, list) and len(weight) != 1:
        raise UnsupportedModelError(
            f"{where} has {len(weight)} stages of weights; treadle-quark reads schemes of one"
        )
    weight = weight[0] if isinstance(weight, list) else weight
    if not isinstance(weight, Mapping):
        raise CheckpointError(f"{where}.weight is {weight!r:.200}, not an object")
    read = _weights(weight, f"{where}.weight")
    inputs = stored.get("input_tensors")
    inputs = inputs[0] if isinstance(inputs, list) and len(inputs) == 1 else inputs
    rounding = None
    if isinstance(inputs, Mapping) and str(inputs.get("dtype")) in INTEGERS[2:]:
        rounding = Rounding(symmetric=inputs.get("symmetric", True) is not False)
    return replace(read, rounds_inputs=inputs is not None, inputs=rounding)


def _weights(spec: Mapping[str, Any], where: str) -> Weights:
    dtype, scheme = str(spec.get("dtype")), spec.get("qscheme")
    if dtype not in (*INTEGERS, FP8, FP4):
        raise _unread(where, "dtype", dtype, ", ".join((*INTEGERS, FP8, FP4)))
    if scheme not in SCHEMES or (scheme == "per_block") > (dtype == FP8):
        raise _unread(where, "qscheme", scheme, ", ".join(SCHEMES))
    if spec.get("is_dynamic"):
        raise _unread(where, "is_dynamic", True, "weights that are quantized in the file")
    axis = spec.get("ch_axis")
    if (scheme == "per_channel" and axis not in (0, -2, None)) or (
        scheme == "per_group" and axis not in (1, -1, None)
    ):
        raise _unread(where, "ch_axis", axis, "0 for per_channel and -1 for per_group")
    if scheme == "per_block":
        rows, columns = (_size(n, where) for n in _pair(spec.get("block_size"), where))
        return Weights(dtype, scheme, block=(rows, columns))
    group = _size(spec.get("group_size"), where) if scheme == "per_group" else 0
    if dtype == FP8 and scheme == "per_group":
        return Weights(dtype, "per_block", block=(1, group))
    if dtype == FP4 and (scheme != "per_group" or spec.get("scale_format") != E8M0):
        raise UnsupportedModelError(
            f"{where} says fp4 with qscheme {scheme!r} and scale_format {spec.get('scale_format')!r}; "
            "treadle-quark reads MXFP4: per_group and 'e8m0'"
        )
    return Weights(dtype, scheme, group)


def _pair(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"{where} says block_size {value!r:.100}; it must be two numbers")
    return value


def _size(value: Any, where: str) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(
            f"{where} says group_size {value!r:.100}; it must be a positive number"
        )
    return value


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern names a matrix or a module that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _unread(where: str, key: str, value: Any, allowed: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{where} says {key} {value!r}; treadle-quark reads {allowed}")
