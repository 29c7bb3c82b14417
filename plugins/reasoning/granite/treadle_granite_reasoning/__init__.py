"""The reasoning parser ``granite``: what two sentences announce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits
from treadle_parsing_kit.reasoning_tags import TaggedReasoningParser, prompt_reasoning_state

if TYPE_CHECKING:
    from treadle.api.types import ReasoningParser, Tokenizer

__all__ = ("treadle_match", "treadle_reasoning_parser")

TAGS = ("Here is my thought process:", "Here is my response:")
SHORT = (("Here's my thought process:",), ("Here's my response:",))
"""As quantized models write them."""


@impl
def treadle_reasoning_parser(
    name: str, tokenizer: Tokenizer, prompt: str
) -> ReasoningParser | None:
    """Granite 3.2 thinks if its template is told so, and announces it in words
    (https://huggingface.co/ibm-granite/granite-3.2-8b-instruct)."""
    if name != "granite":
        return None
    state = prompt_reasoning_state(prompt, TAGS, tokenizer)
    return TaggedReasoningParser(TAGS, state, always=False, aliases=SHORT, hidden=())


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (kind, key) == ("reasoning_parsers", "granite") and model.template_contains(
        "Here is my thought process"
    ):
        return Match(100, "the chat template asks for: Here is my thought process")
    return None
