"""Mixtral models for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.hookspecs import impl
from treadle.api.models import ModelSpec

__all__ = ("treadle_model", "treadle_model_config")


@impl
def treadle_model_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Read the configuration without transformers."""
    from treadle_layers_kit.model_config import read_fields
    from treadle_mixtral.config import FIELDS

    return read_fields(config, FIELDS)


@impl
def treadle_model(architecture: str, hf_config: Any) -> ModelSpec | None:
    """Describe ``MixtralForCausalLM``."""
    if architecture != "MixtralForCausalLM":
        return None
    from treadle_mixtral.model import MixtralForCausalLM

    return ModelSpec(
        architecture=architecture,
        build=MixtralForCausalLM,
        packed_modules_mapping={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        weight_prefix_map={".block_sparse_moe.": ".mlp."},
    )
