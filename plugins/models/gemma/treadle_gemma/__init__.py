"""Gemma 1, 2 and 3 models for treadle."""

from __future__ import annotations

from typing import Any

from treadle.api.hookspecs import impl
from treadle.api.models import ModelSpec

__all__ = ("treadle_model",)

NAMES = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
)


@impl
def treadle_model(architecture: str, hf_config: Any) -> ModelSpec | None:
    """Describe the text models of the three generations of Gemma."""
    if architecture not in NAMES:
        return None
    from treadle_gemma import model

    images = architecture == "Gemma3ForConditionalGeneration"
    return ModelSpec(
        architecture=architecture,
        build=getattr(model, architecture),
        packed_modules_mapping={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
        # Published checkpoints begin with ``language_model.``; those that transformers 5 writes
        # under its own names put the language model below ``model.``.
        weight_prefix_map={"language_model.": "", "model.language_model.": "model."}
        if images
        else {},
        ignored_weights=("*vision_tower.*", "*multi_modal_projector.*") if images else (),
    )
