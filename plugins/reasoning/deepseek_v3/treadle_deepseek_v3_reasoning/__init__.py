"""The reasoning parser ``deepseek_v3``: what the template or the model opened."""

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
    """The template of V3.1 writes one of the tags, which tells whether it thinks
    (https://huggingface.co/deepseek-ai/DeepSeek-V3.1#chat-template)."""
    if name != "deepseek_v3":
        return None
    state = prompt_reasoning_state(prompt, TAGS, tokenizer)
    return TaggedReasoningParser(TAGS, state, always=False)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("reasoning_parsers", "deepseek_v3")
        and model.template_contains("<｜Assistant｜>")
        and model.template_contains("set thinking")
    ):
        return Match(120, "the chat template writes <｜Assistant｜> and knows a variable thinking")
    return None
