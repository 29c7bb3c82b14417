"""The reasoning parser ``deepseek_r1``: everything up to ``</think>``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits
from treadle_parsing_kit.reasoning_tags import TaggedReasoningParser, prompt_reasoning_state

if TYPE_CHECKING:
    from treadle.api.types import ReasoningParser, Tokenizer

__all__ = ("treadle_match", "treadle_reasoning_parser")

TAGS = ("<think>", "</think>")


@impl
def treadle_reasoning_parser(
    name: str, tokenizer: Tokenizer, prompt: str
) -> ReasoningParser | None:
    """R1 always reasons, and the first tag is often missing: its templates of 2025 end with
    ``<think>\\n`` (https://huggingface.co/deepseek-ai/DeepSeek-R1#usage-recommendations)."""
    if name != "deepseek_r1":
        return None
    return TaggedReasoningParser(TAGS, prompt_reasoning_state(prompt, TAGS, tokenizer), always=True)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """DeepSeek's own templates only: of a model that need not think, it would take the answer."""
    if (kind, key) != ("reasoning_parsers", "deepseek_r1"):
        return None
    if model.template_contains("<｜Assistant｜>") and model.template_contains(TAGS[1]):
        return Match(100, "the chat template writes <｜Assistant｜> and </think>")
    return None
