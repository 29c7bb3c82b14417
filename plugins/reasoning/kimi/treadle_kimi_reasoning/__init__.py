"""The reasoning parser ``kimi``: what ``<think>`` and ``</think>`` enclose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits
from treadle_parsing_kit.reasoning_tags import TaggedReasoningParser, prompt_reasoning_state

if TYPE_CHECKING:
    from treadle.api.types import ReasoningParser, Tokenizer

__all__ = ("treadle_match", "treadle_reasoning_parser")

TAGS = ("<think>", "</think>")
OTHER = (("◁think▷",), ("◁/think▷",))


@impl
def treadle_reasoning_parser(
    name: str, tokenizer: Tokenizer, prompt: str
) -> ReasoningParser | None:
    """Kimi K2 Thinking; Kimi-VL writes its tags with other characters
    (https://huggingface.co/moonshotai/Kimi-K2-Thinking)."""
    if name not in ("kimi", "kimi_k2"):
        return None
    state = prompt_reasoning_state(prompt, TAGS, tokenizer)
    return TaggedReasoningParser(
        TAGS, state, always=False, aliases=OTHER, hidden=(*TAGS, *OTHER[0], *OTHER[1])
    )


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("reasoning_parsers", "kimi")
        and model.template_contains("<|im_middle|>")
        and (model.template_contains("</think>") or model.template_contains("◁/think▷"))
    ):
        return Match(100, "the chat template writes <|im_middle|> and </think>")
    return None
