"""Llama and Mistral models for treadle."""

from __future__ import annotations

from typing import Any

from treadle.api.hookspecs import impl
from treadle.api.models import ModelSpec

__all__ = ("treadle_model",)


@impl
def treadle_model(architecture: str, hf_config: Any) -> ModelSpec | None:
    """Describe ``LlamaForCausalLM`` and ``MistralForCausalLM``."""
    if architecture not in ("LlamaForCausalLM", "MistralForCausalLM"):
        return None
    from treadle_llama import model

    return ModelSpec(
        architecture=architecture,
        build=getattr(model, architecture),
        packed_modules_mapping={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
    )
