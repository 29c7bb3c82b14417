"""Mixtral models for treadle."""

from __future__ import annotations

from typing import Any

from treadle.api.hookspecs import impl
from treadle.api.models import ModelSpec

__all__ = ("treadle_model",)


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
