"""Mixtral models for weft."""

from __future__ import annotations

from typing import Any

from weft.api.hookspecs import impl
from weft.api.models import ModelSpec

__all__ = ("weft_model",)


@impl
def weft_model(architecture: str, hf_config: Any) -> ModelSpec | None:
    """Describe ``MixtralForCausalLM``."""
    if architecture != "MixtralForCausalLM":
        return None
    from weft_mixtral.model import MixtralForCausalLM

    return ModelSpec(
        architecture=architecture,
        build=MixtralForCausalLM,
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        renamed={".block_sparse_moe.": ".mlp."},
    )
