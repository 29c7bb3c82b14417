"""GPT-2 for treadle: an architecture from outside of the repository."""

from __future__ import annotations

from treadle.api import impl
from treadle.api.types import ModelSpec

__all__ = ("treadle_model",)


@impl
def treadle_model(architecture: str) -> ModelSpec | None:
    if architecture != "GPT2LMHeadModel":
        return None
    from treadle_gpt2.model import GPT2LMHeadModel

    # Our modules have the checkpoint's names, so nothing is fused or renamed.
    return ModelSpec(
        architecture, GPT2LMHeadModel, ignored_weights=("*.attn.bias", "*.attn.masked_bias")
    )
