"""The reasoning parser ``mistral``: what ``[THINK]`` and ``[/THINK]`` enclose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits
from treadle_parsing_kit.reasoning_tags import TaggedReasoningParser, prompt_reasoning_state

if TYPE_CHECKING:
    from treadle.api.types import ReasoningParser, Tokenizer

__all__ = ("treadle_match", "treadle_reasoning_parser")

TAGS = ("[THINK]", "[/THINK]")


@impl
def treadle_reasoning_parser(
    name: str, tokenizer: Tokenizer, prompt: str
) -> ReasoningParser | None:
    """Magistral is asked for it by its system prompt, which shows the tags
    (https://huggingface.co/mistralai/Magistral-Small-2509)."""
    if name not in ("mistral", "magistral"):
        return None
    state = prompt_reasoning_state(prompt, TAGS, tokenizer)
    return TaggedReasoningParser(TAGS, state, always=False)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("reasoning_parsers", "mistral") and model.template_contains("[THINK]")
    ) or "[THINK]" in model.tokens:
        return Match(100, "[THINK] is in the chat template or the vocabulary")
    return None
