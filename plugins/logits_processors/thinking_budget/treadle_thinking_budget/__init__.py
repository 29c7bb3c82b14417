"""The logits processor ``thinking_budget``: a thought ends after so many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import LogitsProcessor

__all__ = ("treadle_logits_processor",)


@impl
def treadle_logits_processor(name: str) -> LogitsProcessor | None:
    if name != "thinking_budget":
        return None
    from treadle_thinking_budget.processor import ThinkingBudget

    return ThinkingBudget()
