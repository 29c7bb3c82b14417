"""What a checkpoint of torchao says about itself: the ``TorchAoConfig`` of transformers.

Configurations of torchao are written as ``{"_type": class, "_data": fields, "_version": number}``, which is read as
data: no class of torchao is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from treadle.errors import CheckpointError, UnsupportedModelError
from treadle_layers_kit.rounded_inputs import Rounding
from treadle_layers_kit.schemes import check_method, listed_names

__all__ = ("Config", "Weights", "read_config")

KEY = "torchao"
INT8 = (
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"),
    "Int8StaticActivationInt8WeightConfig",
)
INTX = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
INT4 = ("Int4WeightOnlyConfig", "Float8DynamicActivationInt4WeightConfig")
FP8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
E4M3 = "float8_e4m3fn"
PLAIN = "PLAIN"
DEFAULT = "_default"


@dataclass(frozen=True, slots=True)
class Weights:
    """``group`` inputs share a scale; 0: all of them. ``block`` is that of FP8; (1, 0): each output has a scale."""

    kind: Literal["int", "fp8"]
    bits: int = 8
    group: int = 0
    block: tuple[int, int] = (1, 0)
    pairs: bool = False
    """Whether two codes share a byte in the file."""
    rounds_inputs: bool = False
    """Whether activations were to be rounded to FP8, too."""
    inputs: Rounding | None = None
    """How they were to be rounded to int8."""


@dataclass(frozen=True, slots=True)
class Config:
    """``names`` are exact or begin with ``re:``; ``default`` is for all other layers, ``None`` in full."""

    default: Weights | None
    names: Mapping[str, Weights | None]
    unquantized: tuple[str, ...]

    def weights(self, name: str) -> Weights | None:
        """How the matrix of this name is stored; ``None``: as it is."""
        for exact in (f"{name}.weight", name):
            if exact in self.names:
                return self.names[exact]
        for pattern, weights in self.names.items():
            if pattern.startswith("re:") and (
                re.fullmatch(pattern[3:], f"{name}.weight") or re.fullmatch(pattern[3:], name)
            ):
                return weights
        return self.default


def read_config(checkpoint: Mapping[str, Any]) -> Config:
    """Read a ``quantization_config``.

    Raises ``ConfigError`` if the checkpoint is another's, ``UnsupportedModelError`` for a variant that
    this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    check_method(checkpoint, KEY)
    if checkpoint.get("include_input_output_embeddings"):
        raise UnsupportedModelError(
            "quantization_config says include_input_output_embeddings: embeddings and the head of a "
            "model stay in full here; quantize it without this option"
        )
    names = listed_names(checkpoint, "modules_to_not_convert")
    stored = checkpoint.get("quant_type")
    stored = stored.get("default", stored) if isinstance(stored, Mapping) else stored
    type, data = _typed(stored, "quant_type")
    if type not in BY_NAME:
        return Config(_weights(stored, "quant_type"), {}, names)
    table = data.get("fqn_to_config") or data.get("module_fqn_to_config")
    if not isinstance(table, Mapping):
        raise CheckpointError(f"quant_type says {type} without an object fqn_to_config")
    layers = {}
    for name, value in table.items():
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise CheckpointError(f"{name!r} is no regular expression: {error}") from error
        layers[name] = None if value is None else _weights(value, f"quant_type.{name}")
    return Config(layers.pop(DEFAULT, None), layers, names)


def _typed(stored: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    match stored:
        case {"_type": str(type), "_data": Mapping() as data}:
            return type, data
    raise CheckpointError(
        f"{where} in quantization_config is {stored!r:.200}; an object of _type and _data is needed "
        "(strings such as 'int8_weight_only' were written before torchao had safetensors)"
    )


def _weights(stored: Any, where: str) -> Weights:
    type, data = _typed(stored, where)
    if type in INT8:
        group = data.get("group_size") or _group(data.get("granularity"), where)
        symmetric = _value(data.get("act_mapping_type"), "SYMMETRIC") != "ASYMMETRIC"
        inputs = None if type == INT8[0] else Rounding(symmetric=symmetric)
        return Weights("int", 8, _size(group, where), inputs=inputs)
    if type in INTX:
        dtype = _value(data.get("weight_dtype"), "int8")
        if not re.fullmatch("int[1-8]", dtype):
            raise _unread(where, "weight_dtype", dtype, "int1 to int8")
        granularity = data.get("granularity") or data.get("weight_granularity")
        return Weights("int", int(dtype[3:]), _size(_group(granularity, where), where))
    if type in INT4:
        packing = _value(data.get("int4_packing_format"), PLAIN)
        if packing.upper() != PLAIN:
            raise _unread(
                where, "int4_packing_format", packing, "plain; others are made for one kernel"
            )
        return Weights("int", 4, _size(data.get("group_size", 128), where), pairs=True)
    if type in FP8:
        dtype = _value(data.get("weight_dtype"), E4M3)
        if dtype != E4M3:
            raise _unread(where, "weight_dtype", dtype, E4M3)
        granularity = data.get("granularity")
        granularity = granularity[-1] if isinstance(granularity, list) else granularity
        if isinstance(granularity, Mapping) and granularity.get("_type") == "PerBlock":
            block = _typed(granularity, where)[1].get("block_size")
            if not isinstance(block, list) or len(block) != 2:
                raise CheckpointError(f"{where} says block_size {block!r:.100}, not two numbers")
            size = _size(block[0], where), _size(block[1], where)
            return Weights("fp8", block=size, rounds_inputs=type == FP8[1])
        return Weights("fp8", rounds_inputs=type == FP8[1])
    raise _unread(where, "_type", type, ", ".join((*INT8, *INTX, *INT4, *FP8)))


def _group(granularity: Any, where: str) -> Any:
    """Return the inputs of a group; 0 if a scale is that of an output or of the matrix."""
    granularity = granularity[-1] if isinstance(granularity, list) else granularity
    if granularity is None:
        return 0
    type, data = _typed(granularity, where)
    match type:
        case "PerGroup":
            return data.get("group_size")
        case "PerRow" if data.get("dim", -1) in (-1, 1):
            return 0
        case "PerAxis" if data.get("axis", 0) == 0:
            return 0
        case "PerTensor":
            return 0
    raise _unread(where, "granularity", f"{type} {dict(data)}", "groups, rows and whole matrices")


def _value(stored: Any, default: str) -> str:
    return str(stored.get("_data") if isinstance(stored, Mapping) else stored or default)


def _size(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise CheckpointError(
            f"{where} says group_size {value!r:.100}; it must be a positive number"
        )
    return value


def _unread(where: str, key: str, value: str, allowed: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{where} says {key} {value!r}; treadle-torchao reads {allowed}")
