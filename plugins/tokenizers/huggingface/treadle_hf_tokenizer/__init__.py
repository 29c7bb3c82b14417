"""The tokenizer ``auto``: what published checkpoints have, on Hugging Face's ``tokenizers``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import ModelFiles, Tokenizer

__all__ = ("treadle_tokenizer",)


@impl
def treadle_tokenizer(mode: str, files: ModelFiles) -> Tokenizer | None:
    """Open the tokenizer of a checkpoint."""
    if mode != "auto":
        return None
    from treadle_hf_tokenizer.tokenizer import AutoTokenizer

    return AutoTokenizer.open(files)
