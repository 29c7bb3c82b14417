"""The reasoning parser ``glm``: what ``<think>`` and ``</think>`` enclose."""

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
    """GLM 4.5 decides itself whether to think, unless its template closes the thought beforehand
    (https://huggingface.co/zai-org/GLM-4.5)."""
    if name not in ("glm", "glm45"):
        return None
    state = prompt_reasoning_state(prompt, TAGS, tokenizer)
    return TaggedReasoningParser(TAGS, state, always=False)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("reasoning_parsers", "glm")
        and model.template_contains("<arg_key>")
        and model.template_contains("<think>")
    ):
        return Match(100, "the chat template writes <arg_key> and <think>")
    return None
