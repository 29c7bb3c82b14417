"""Qwen 2, 2.5 and 3 models for weft."""

from __future__ import annotations

from typing import Any

from weft.api.hookspecs import impl
from weft.api.models import ModelSpec

__all__ = ("weft_model",)


@impl
def weft_model(architecture: str, hf_config: Any) -> ModelSpec | None:
    """Describe ``Qwen2ForCausalLM``, ``Qwen3ForCausalLM`` and ``Qwen3MoeForCausalLM``."""
    if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    from weft_qwen import model

    return ModelSpec(
        architecture=architecture,
        build=getattr(model, architecture),
        fused={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
    )
