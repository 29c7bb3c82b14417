"""What an AWQ checkpoint says about itself.

Written by AutoAWQ (``w_bit``, ``q_group_size``, ``version``), transformers (``bits``,
``group_size``, ``version``) and GPTQModel (``bits``, ``group_size``, ``format``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.errors import CheckpointError, UnsupportedModelError
from treadle_layers_kit.schemes import check_method, listed_names

__all__ = ("AwqConfig", "read_config")

METHODS = ("awq", "awq_marlin")
LAYOUTS = ("gemm", "gemv", "gemv_fast")
AUTO_ROUND = ("auto_round:auto_awq", "auto_awq")


@dataclass(frozen=True, slots=True)
class AwqConfig:
    """``group_size`` inputs share a scale and a zero point; -1: all inputs do."""

    group_size: int
    unquantized: tuple[str, ...] = ()
    layout: str = "gemm"


def read_config(checkpoint: Mapping[str, Any]) -> AwqConfig:
    """Read a ``quantization_config``.

    Raises ``ConfigError`` if the checkpoint is no AWQ checkpoint, ``UnsupportedModelError`` for a
    variant that this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    method = checkpoint.get("quant_method", "awq")
    if method == "auto-round" and checkpoint.get("packing_format") in AUTO_ROUND:
        extra = checkpoint.get("extra_config") or {}
        full = [n for n, v in extra.items() if isinstance(v, Mapping) and v.get("bits") == 16]
        checkpoint = {**checkpoint, "modules_to_not_convert": full}
    else:
        check_method(checkpoint, *METHODS)
    bits = _read_int(checkpoint, "bits", "w_bit", default=4)
    if bits != 4:
        raise UnsupportedModelError(
            f"quantization_config says {bits} bits; AWQ checkpoints have 4 (for others: GPTQ)"
        )
    version = _first_value(checkpoint, "version", "format", "checkpoint_format", default="gemm")
    layout = str(version).lower()
    if layout not in LAYOUTS:
        raise UnsupportedModelError(
            f"quantization_config says version {version!r}; treadle-awq reads {', '.join(LAYOUTS)}"
        )
    group_size = _read_int(checkpoint, "group_size", "q_group_size", default=128)
    if group_size < 1 and group_size != -1:
        raise CheckpointError(
            f"quantization_config says group_size {group_size}; it must be positive, or -1 for one "
            "group"
        )
    names = listed_names(checkpoint, "modules_to_not_convert")
    if layout != "gemm" and group_size not in (32, 64) and group_size < 128:
        raise UnsupportedModelError(
            f"quantization_config says version {version!r} with group_size {group_size}; this packing has "
            "32, 64, 128 and more"
        )
    return AwqConfig(group_size, names, layout)


def _first_value(checkpoint: Mapping[str, Any], *keys: str, default: Any) -> Any:
    return next((checkpoint[key] for key in keys if checkpoint.get(key) is not None), default)


def _read_int(checkpoint: Mapping[str, Any], *keys: str, default: int) -> int:
    value = _first_value(checkpoint, *keys, default=default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(
            f"quantization_config says {keys[0]} {value!r}; it must be a whole number"
        )
    return value
