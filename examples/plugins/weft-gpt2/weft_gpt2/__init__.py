"""GPT-2 for weft: an architecture from outside of the repository."""

from __future__ import annotations

from weft.api import impl
from weft.api.types import ModelSpec

__all__ = ("weft_model",)


@impl
def weft_model(architecture: str) -> ModelSpec | None:
    if architecture != "GPT2LMHeadModel":
        return None
    from weft_gpt2.model import GPT2LMHeadModel

    # Our modules have the checkpoint's names, so nothing is fused or renamed.
    return ModelSpec(architecture, GPT2LMHeadModel, ignored=("*.attn.bias", "*.attn.masked_bias"))
