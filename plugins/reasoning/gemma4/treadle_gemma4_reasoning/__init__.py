"""The reasoning parser ``gemma4``: what ``<|channel>`` and ``<channel|>`` enclose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits
from treadle_parsing_kit.reasoning_tags import TaggedReasoningParser, prompt_reasoning_state

if TYPE_CHECKING:
    from treadle.api.types import ReasoningParser, Tokenizer

__all__ = ("treadle_match", "treadle_reasoning_parser")

TAGS = ("<|channel>", "<channel|>")


@impl
def treadle_reasoning_parser(
    name: str, tokenizer: Tokenizer, prompt: str
) -> ReasoningParser | None:
    """A channel begins with its name, ``thought``
    (https://ai.google.dev/gemma/docs/capabilities/thinking)."""
    if name != "gemma4":
        return None
    state = prompt_reasoning_state(prompt, TAGS, tokenizer)
    return TaggedReasoningParser(TAGS, state, always=False, label="thought\n")


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("reasoning_parsers", "gemma4") and model.template_contains("<|channel>"):
        return Match(100, "the chat template writes <|channel>")
    return None
