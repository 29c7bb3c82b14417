"""The logits processor ``repetition_window``: no n-gram comes twice within the last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.api import impl

if TYPE_CHECKING:
    from weft.api.types import LogitsProcessor

__all__ = ("weft_logits_processor",)


@impl
def weft_logits_processor(name: str) -> LogitsProcessor | None:
    if name != "repetition_window":
        return None
    from weft_repetition_window.processor import RepetitionWindow

    return RepetitionWindow()
