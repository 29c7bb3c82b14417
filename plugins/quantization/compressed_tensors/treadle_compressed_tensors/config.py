"""What a checkpoint of llm-compressor says about itself: which layers are stored how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from treadle.errors import CheckpointError, UnsupportedModelError
from treadle_layers_kit.rounded_inputs import Rounding
from treadle_layers_kit.schemes import check_method, listed_names

__all__ = ("Config", "Weights", "read_config")

KEY = "compressed-tensors"
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
)
LINEAR = "Linear"
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Weights:
    """How the weights of a group of layers are stored.

    ``kind`` is ``int4``, ``int8``, ``fp8``, ``nvfp4`` or ``mxfp4``; ``strategy`` is what shares a scale.
    """

    kind: str
    strategy: str
    group_size: int = 0
    block: tuple[int, int] = (1, 0)
    symmetric: bool = True
    packed: bool = False
    act_order: bool = False
    rounds_inputs: bool = False
    """Whether activations were to be rounded as the weights are."""
    inputs: Rounding | None = None
    """How they were to be rounded to int8, if the weights are such that int8 multiplies both."""


@dataclass(frozen=True, slots=True)
class Config:
    """``groups`` are those of ``config_groups``: their targets, and ``None`` for weights in full."""

    groups: tuple[tuple[tuple[str, ...], Weights | None], ...]
    ignore: tuple[str, ...]

    def weights(self, name: str) -> Weights | None:
        """How the matrix of this name is stored; ``None``: as it is."""
        if any(_matches(name, pattern) for pattern in self.ignore):
            return None
        found = [
            (rank, index)
            for index, (targets, _) in enumerate(self.groups)
            for target in targets
            if (rank := _matches(name, target))
        ]
        return self.groups[min(found)[1]][1] if found else None


def read_config(checkpoint: Mapping[str, Any]) -> Config:
    """Read a ``quantization_config``.

    Raises ``ConfigError`` if the checkpoint is another's, ``UnsupportedModelError`` for a variant that
    this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    check_method(checkpoint, KEY)
    _check_whole(checkpoint)
    groups = checkpoint.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise CheckpointError("config_groups in quantization_config is not an object of groups")
    read = []
    for name, group in groups.items():
        format = group.get("format") or checkpoint.get("format") or "dense"
        where = f"config_groups.{name}"
        if format not in FORMATS:
            raise UnsupportedModelError(_unread(where, "format", format, FORMATS))
        weights = group.get("weights")
        targets = tuple(_names(group, "targets", where))
        stored = None if weights is None else _weights(weights, format, where)
        inputs = group.get("input_activations")
        if stored is not None and isinstance(inputs, Mapping):
            stored = replace(stored, rounds_inputs=True, inputs=_rounding(inputs, stored))
        read.append((targets, stored))
    return Config(tuple(read), tuple(_names(checkpoint, "ignore", "quantization_config")))


def _check_whole(checkpoint: Mapping[str, Any]) -> None:
    sparsity = checkpoint.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError(
            f"quantization_config says sparsity_config {sparsity!r:.200}: sparse weights need kernels that "
            "treadle does not have; use the same model without sparsity"
        )
    if checkpoint.get("transform_config"):
        raise UnsupportedModelError(
            "quantization_config says transform_config: weights are rotated, and treadle does not "
            "rotate activations to match; use a checkpoint without transforms"
        )


def _weights(args: Mapping[str, Any], format: str, where: str) -> Weights:
    bits, type = args.get("num_bits", 8), args.get("type", "int")
    strategy, size = args.get("strategy") or "tensor", args.get("group_size")
    symmetric = args.get("symmetric", True) is not False
    allowed: tuple[str, ...]
    match (type, bits):
        case ("int", 4 | 8):
            allowed = ("tensor", "channel", "group")
            kind = f"int{bits}"
        case ("float", 8):
            allowed, kind = ("tensor", "channel", "block"), "fp8"
        case ("float", 4):
            kind = "mxfp4" if format == "mxfp4-pack-quantized" else "nvfp4"
            allowed = ("group",) if kind == "mxfp4" else ("tensor_group",)
            size = size or (32 if kind == "mxfp4" else 16)
        case _:
            raise UnsupportedModelError(
                f"{where} says {bits!r} bits of type {type!r}; treadle-compressed-tensors reads int of 4 "
                "and 8 bits, float of 8 and 4 bits"
            )
    if strategy not in allowed:
        raise UnsupportedModelError(_unread(where, "strategy", strategy, allowed))
    if type == "float" and not symmetric:
        raise UnsupportedModelError(f"{where} says symmetric false, which is for integers only")
    if strategy in ("group", "tensor_group") and not (_is_size(size)):
        raise CheckpointError(f"{where} says group_size {size!r}; it must be a positive number")
    block = (1, 0)
    if strategy == "block":
        shape = args.get("block_structure")
        shape = shape.split("x") if isinstance(shape, str) else shape
        block = _block(shape, where)
    packed = format in ("pack-quantized", "mixed-precision") or (format == "dense" and bits == 4)
    act_order = args.get("actorder") in (True, "group")
    return Weights(kind, strategy, size or 0, block, symmetric, packed, act_order)


def _rounding(args: Mapping[str, Any], weights: Weights) -> Rounding | None:
    is_int8 = (args.get("type", "int"), args.get("num_bits", 8)) == ("int", 8)
    is_plain = weights.symmetric and not weights.packed and weights.strategy != "group"
    if weights.kind != "int8" or not is_plain or not is_int8 or args.get("strategy") == "group":
        return None
    return Rounding(not args.get("dynamic", False), args.get("symmetric", True) is not False)


def _block(shape: Any, where: str) -> Place:
    try:
        rows, columns = (int(n) for n in shape)
    except (TypeError, ValueError):
        rows = columns = 0
    if not (_is_size(rows) and _is_size(columns)):
        raise CheckpointError(f"{where} says block_structure {shape!r}; it must be two numbers")
    return rows, columns


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _names(values: Mapping[str, Any], key: str, where: str) -> Iterator[str]:
    for name in listed_names(values, key, where):
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise CheckpointError(
                    f"{name!r} in {key} of {where} is no regular expression: {error}"
                ) from error
        yield name


def _matches(name: str, target: str) -> int:
    """0, or how well a target names a matrix: 1 by its name, 2 by a pattern, 3 by its class."""
    if name == target:
        return 1
    if target.startswith("re:") and re.match(target[3:], name):
        return 2
    return 3 * (target == LINEAR)


def _unread(where: str, key: str, value: Any, allowed: tuple[str, ...]) -> str:
    return f"{where} says {key} {value!r}; treadle-compressed-tensors reads {', '.join(allowed)}"
