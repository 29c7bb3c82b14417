"""The reasoning parser ``hunyuan``: what ``<think>`` and ``</think>`` enclose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits
from treadle_parsing_kit.reasoning_tags import TaggedReasoningParser, prompt_reasoning_state

if TYPE_CHECKING:
    from treadle.api.types import ReasoningParser, Tokenizer

__all__ = ("treadle_match", "treadle_reasoning_parser")

TAGS = ("<think>", "</think>")
ANSWER = ("<answer>", "\n</answer>", "</answer>")


@impl
def treadle_reasoning_parser(
    name: str, tokenizer: Tokenizer, prompt: str
) -> ReasoningParser | None:
    """The answer has tags as well, which are dropped
    (https://huggingface.co/tencent/Hunyuan-A13B-Instruct)."""
    if name not in ("hunyuan", "hunyuan_a13b"):
        return None
    state = prompt_reasoning_state(prompt, TAGS, tokenizer)
    return TaggedReasoningParser(TAGS, state, always=False, hidden=(*TAGS, *ANSWER))


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("reasoning_parsers", "hunyuan")
        and model.template_contains("</think>")
        and model.template_contains("<answer>")
    ):
        return Match(100, "the chat template writes </think> and <answer>")
    return None
