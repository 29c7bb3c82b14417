"""What an FP8 checkpoint says about itself.

``quant_method`` ``fp8`` is written by AutoFP8 (one scale for a matrix, ``ignored_layers``),
DeepSeek and Qwen (``weight_block_size``, ``modules_to_not_convert``), Mistral and transformers
(either); ``fbgemm_fp8`` by transformers and Meta (one scale for each output).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from treadle.errors import CheckpointError, ConfigError, UnsupportedModelError
from treadle_layers_kit.schemes import listed_names

__all__ = ("Fp8Config", "read_config")

STORED = ("fp8", "fbgemm_fp8")


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """How weights are scaled, and activations where the device multiplies in FP8.

    ``online``: the checkpoint is not quantized, and the weights are while they are loaded.
    ``static``: the checkpoint brings the scale of the activations. ``limit`` bounds the largest
    activation that a dynamic scale considers.
    """

    scales: Literal["tensor", "channel", "block"]
    online: bool = False
    static: bool = False
    block: tuple[int, int] = (1, 0)
    limit: float | None = None
    unquantized: tuple[str, ...] = ()


def read_config(method: str, checkpoint: Mapping[str, Any]) -> Fp8Config:
    """Read a ``quantization_config``; an empty one means to quantize while loading.

    Raises ``ConfigError`` if the checkpoint is quantized otherwise, ``UnsupportedModelError`` for a
    variant that this plugin does not read, ``CheckpointError`` for values that mean nothing.
    """
    if not checkpoint:
        if method == "fbgemm_fp8":
            raise ConfigError(
                "option quantization is 'fbgemm_fp8', but this checkpoint is not quantized; use "
                "'fp8' to quantize it while loading"
            )
        return Fp8Config("channel", online=True)
    stored_method = checkpoint.get("quant_method", "fp8")
    if stored_method not in STORED:
        raise ConfigError(
            f"option quantization is {method!r}, but this checkpoint is quantized with {stored_method!r}; "
            "leave the option out"
        )
    unquantized = (
        *listed_names(checkpoint, "modules_to_not_convert"),
        *listed_names(checkpoint, "ignored_layers"),
    )
    if stored_method == "fbgemm_fp8":
        limit = checkpoint.get("activation_scale_ub")
        return Fp8Config(
            "channel", limit=None if limit is None else float(limit), unquantized=unquantized
        )
    fmt = checkpoint.get("fmt") or "e4m3"
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModelError(f"quantization_config says fmt {fmt!r}; treadle-fp8 reads e4m3")
    if (bits := checkpoint.get("bits", 8)) != 8:
        raise UnsupportedModelError(f"quantization_config says {bits} bits; FP8 has 8")
    scheme = str(checkpoint.get("activation_scheme", "dynamic")).lower()
    if scheme not in ("static", "dynamic"):
        raise UnsupportedModelError(
            f"quantization_config says activation_scheme {scheme!r}; treadle-fp8 reads static and "
            "dynamic"
        )
    block = checkpoint.get("weight_block_size")
    if block is None:
        return Fp8Config("tensor", static=scheme == "static", unquantized=unquantized)
    if scheme == "static":
        raise UnsupportedModelError(
            "quantization_config says activation_scheme 'static' with weight_block_size; blocks "
            "have dynamic activations"
        )
    return Fp8Config("block", block=_block(block), unquantized=unquantized)


def _block(value: Any) -> tuple[int, int]:
    sizes = tuple(value) if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise CheckpointError(
            f"quantization_config says weight_block_size {value!r}; it must be two positive numbers"
        )
    return sizes[0], sizes[1]
