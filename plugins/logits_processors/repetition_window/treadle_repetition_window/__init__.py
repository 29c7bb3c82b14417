"""The logits processor ``repetition_window``: no n-gram comes twice within the last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api import impl

if TYPE_CHECKING:
    from treadle.api.types import LogitsProcessor

__all__ = ("treadle_logits_processor",)


@impl
def treadle_logits_processor(name: str) -> LogitsProcessor | None:
    if name != "repetition_window":
        return None
    from treadle_repetition_window.processor import RepetitionWindow

    return RepetitionWindow()
