"""GPT-OSS models for treadle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.api.hookspecs import impl
from treadle.api.models import ModelSpec

__all__ = ("treadle_model", "treadle_model_config")


@impl
def treadle_model_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Read the configuration without transformers."""
    from treadle_gpt_oss.config import FIELDS
    from treadle_layers_kit.model_config import read_fields

    return read_fields(config, FIELDS)


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
