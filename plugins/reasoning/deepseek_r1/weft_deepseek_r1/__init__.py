"""The reasoning parser ``deepseek_r1``: everything up to ``</think>``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.api import impl
from weft.api.matching import Match, ModelTraits
from weft.api.thinking import Thinking, opened

if TYPE_CHECKING:
    from weft.api.types import ReasoningParser, Tokenizer

__all__ = ("weft_match", "weft_reasoning_parser")

TAGS = ("<think>", "</think>")


@impl
def weft_reasoning_parser(name: str, tokenizer: Tokenizer, prompt: str) -> ReasoningParser | None:
    """R1 always reasons, and the first tag is often missing: its templates of 2025 end with
    ``<think>\\n`` (https://huggingface.co/deepseek-ai/DeepSeek-R1#usage-recommendations)."""
    if name != "deepseek_r1":
        return None
    return Thinking(TAGS, opened(prompt, TAGS, tokenizer), always=True)


@impl
def weft_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """DeepSeek's own templates only: of a model that need not think, it would take the answer."""
    if (kind, key) != ("reasoning", "deepseek_r1"):
        return None
    if model.writes("<｜Assistant｜>") and model.writes(TAGS[1]):
        return Match(100, "the chat template writes <｜Assistant｜> and </think>")
    return None
