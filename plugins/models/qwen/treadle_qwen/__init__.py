"""Qwen 2, 2.5 and 3 models for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.hookspecs import impl
from treadle.api.models import ModelSpec

__all__ = ("treadle_model", "treadle_model_config")


@impl
def treadle_model_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Read the configurations without transformers."""
    from treadle_layers_kit.model_config import read_fields
    from treadle_qwen.config import FIELDS

    return read_fields(config, FIELDS)


@impl
def treadle_model(architecture: str, hf_config: Any) -> ModelSpec | None:
    """Describe ``Qwen2ForCausalLM``, ``Qwen3ForCausalLM`` and ``Qwen3MoeForCausalLM``."""
    if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        return None
    from treadle_qwen import model

    return ModelSpec(
        architecture=architecture,
        build=getattr(model, architecture),
        packed_modules_mapping={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
    )
