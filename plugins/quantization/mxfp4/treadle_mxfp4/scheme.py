"""What the ``quantization_config`` of MXFP4 means for the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.models import ExpertsMethod, ExpertsSpec, LinearMethod, LinearSpec
from treadle_layers_kit.quantized import is_layer_skipped
from treadle_layers_kit.schemes import LinearScheme, check_method, listed_names
from treadle_mxfp4.layers import Mxfp4Experts, Mxfp4Linear

__all__ = ("Mxfp4Scheme", "read_config")

KEY = "mxfp4"
HEADS = ("lm_head",)
LEAVES = {"weight_blocks": "blocks", "weight_scales": "scales"}


def read_config(checkpoint: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules in full. Raises ``ConfigError`` and ``CheckpointError``."""
    check_method(checkpoint, KEY)
    return listed_names(checkpoint, "modules_to_not_convert")


class Mxfp4Scheme(LinearScheme):
    """Also ``SupportsWeightRenaming``: ``weight_blocks`` are the ``blocks`` of a layer."""

    name = KEY

    def __init__(self, unquantized: tuple[str, ...]) -> None:
        self.unquantized = (*HEADS, *unquantized)

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        return None if is_layer_skipped(spec, self.unquantized) else Mxfp4Linear()

    def experts_method(self, spec: ExpertsSpec) -> ExpertsMethod | None:
        layer = LinearSpec(
            spec.prefix, spec.names, spec.hidden_size, (0,) * 3, bias=False, dtype=spec.dtype
        )
        return None if is_layer_skipped(layer, self.unquantized) else Mxfp4Experts()

    def rename(self, name: str) -> str | None:
        path, _, leaf = name.rpartition(".")
        return f"{path}.{LEAVES.get(leaf, leaf)}"
