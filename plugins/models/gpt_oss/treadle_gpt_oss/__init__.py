"""GPT-OSS models for treadle."""

from __future__ import annotations

from typing import Any

from treadle.api.hookspecs import impl
from treadle.api.models import ModelSpec

__all__ = ("treadle_model",)


@impl
def treadle_model(architecture: str, hf_config: Any) -> ModelSpec | None:
    """Describe ``GptOssForCausalLM``."""
    if architecture != "GptOssForCausalLM":
        return None
    from treadle_gpt_oss.model import GptOssForCausalLM

    return ModelSpec(
        architecture=architecture,
        build=GptOssForCausalLM,
        packed_modules_mapping={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
        weight_prefix_map={".mlp.router.": ".mlp.gate."},
    )
