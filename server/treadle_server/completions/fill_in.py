"""Filling in: the prompt that makes a model write what stands between two texts.

A model that was trained to has three tokens for it; ``FORMATS`` knows those in use.
"""

from __future__ import annotations

from treadle.api.files import Tokenizer
from treadle.errors import RequestError

__all__ = ("FORMATS", "fill_in_prompt")

FORMATS = (
    ("<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>", "Qwen Coder, CodeGemma"),
    ("<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>", "StarCoder, Granite"),
    ("<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>", "SantaCoder"),
    ("<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>", "DeepSeek Coder"),
    ("[SUFFIX]{suffix}[PREFIX]{prefix}", "Codestral"),
)
"""The form of a prompt, and models that were trained with it."""


def fill_in_prompt(prefix: str, suffix: str, tokenizer: Tokenizer) -> str:
    """Return the prompt. Raises ``RequestError`` for a model without tokens for filling in."""
    for form, _ in FORMATS:
        tags = form.replace("{prefix}", " ").replace("{suffix}", " ").split()
        if all(is_token(tag, tokenizer) for tag in tags):
            return form.format(prefix=prefix, suffix=suffix)
    models = ", ".join(models for _, models in FORMATS)
    raise RequestError(
        "suffix is given, but the tokenizer of this model has no tokens for filling in; leave it "
        f"out, or serve a model like {models}",
        param="suffix",
    )


def is_token(text: str, tokenizer: Tokenizer) -> bool:
    return len(tokenizer.encode(text, add_special_tokens=False)) == 1
