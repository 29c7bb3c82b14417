"""What a plugin may know of a model to say whether it is made for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ("Match", "ModelTraits")


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The checkpoint as it describes itself. Whatever a checkpoint does not have is empty."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """``config.json``, with the option ``hf_overrides`` merged into it."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """The sources of the chat templates that are in use, by name (``default``, ``tool_use``)."""
    tokens: frozenset[str] = frozenset()
    """The texts that the tokenizer was given as one token each: the special ones and all others
    that were added to its vocabulary."""

    def writes(self, text: str) -> bool:
        """Whether a chat template holds ``text``, as it stands in the template's source."""
        return any(text in template for template in self.templates.values())


@dataclass(frozen=True, slots=True)
class Match:
    """A plugin is made for a model. Of several matches the highest score wins; equal ones are an
    error, which asks the user.

    Scores mean the same in every kind: 100 for a sign that no other format has, 50 for one that a
    more special plugin may claim as well, 10 for what fits any model.
    """

    score: int
    reason: str
    """What was found, for ``treadle serve --explain``: "the chat template writes <tool_call>"."""
