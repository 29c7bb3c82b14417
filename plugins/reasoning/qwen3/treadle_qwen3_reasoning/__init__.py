"""The reasoning parser ``qwen3``: what ``<think>`` and ``</think>`` enclose."""

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
    """Qwen3 writes both tags itself, and answers without any when it does not think; its
    template closes the thought beforehand for ``enable_thinking=False``, and that of its thinking
    models opens it (https://qwen.readthedocs.io/en/latest/getting_started/quickstart.html)."""
    if name != "qwen3":
        return None
    return TaggedReasoningParser(
        TAGS, prompt_reasoning_state(prompt, TAGS, tokenizer), always=False
    )


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    """Any model with these tags: an answer that does not begin with one is left as it is."""
    if (kind, key) != ("reasoning_parsers", "qwen3"):
        return None
    if model.template_contains(TAGS[1]):
        return Match(50, "the chat template knows </think>")
    if model.tokens.issuperset(TAGS):
        return Match(50, "<think> and </think> are tokens of the vocabulary")
    return None
