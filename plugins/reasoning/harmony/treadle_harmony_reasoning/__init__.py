"""The reasoning parser ``harmony``: the channel ``analysis`` of gpt-oss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl
from treadle.api.matching import Match, ModelTraits

if TYPE_CHECKING:
    from treadle.api.types import ReasoningParser, Tokenizer

__all__ = ("treadle_match", "treadle_reasoning_parser")


@impl
def treadle_reasoning_parser(
    name: str, tokenizer: Tokenizer, prompt: str
) -> ReasoningParser | None:
    if name not in ("harmony", "openai_gptoss"):
        return None
    from treadle_harmony_reasoning.parser import Harmony

    return Harmony(prompt)


@impl
def treadle_match(kind: str, key: str, model: ModelTraits) -> Match | None:
    if (
        (kind, key) == ("reasoning_parsers", "harmony")
        and model.template_contains("<|channel|>")
        and model.template_contains("<|message|>")
    ):
        return Match(100, "the chat template writes <|channel|> and <|message|>")
    return None
