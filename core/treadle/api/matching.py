"""Model traits and matches: how a plugin decides whether it fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ("Match", "ModelTraits")


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Traits of a checkpoint. Empty if the checkpoint does not have them."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """``config.json``, with the option ``hf_overrides`` merged into it."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Sources of the chat templates in use, by name (``default``, ``tool_use``)."""
    tokens: frozenset[str] = frozenset()
    """Texts of the tokenizer's special and other added tokens."""

    def template_contains(self, text: str) -> bool:
        """Return whether the source of a chat template contains ``text``."""
        return any(text in template for template in self.templates.values())


@dataclass(frozen=True, slots=True)
class Match:
    """A plugin's claim that it fits a model. The highest score is selected; of a tie, treadle's own plugin.

    Scores in every kind: 100 for a unique sign of a format, 50 for a sign that a more specific
    plugin may claim as well, 10 for a plugin that fits any model.
    """

    score: int
    reason: str
    """The sign, for ``treadle serve --explain``: "the chat template writes <tool_call>"."""
