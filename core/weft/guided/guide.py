"""One sequence inside its grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.api.guided import Matcher

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("Guide",)


class Guide:
    """A matcher, and the gate before it: while the sequence is reasoning, everything is allowed.

    ``reasoning`` takes each token and tells whether the reasoning goes on after it; ``None`` if
    the grammar holds from the first token.
    """

    def __init__(self, matcher: Matcher, reasoning: Callable[[int], bool] | None = None) -> None:
        self._matcher = matcher
        self._reasoning = reasoning

    @property
    def gated(self) -> bool:
        """Whether the next token is free."""
        return self._reasoning is not None

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Write the allowed ids of the next token; see ``Matcher.fill``."""
        self._matcher.fill(bitmask, row)

    def advance(self, token: int) -> bool:
        """The sequence has gained ``token``, which no stop id ended. ``True`` if it is complete."""
        if self._reasoning is not None:
            if not self._reasoning(token):
                self._reasoning = None
            return False
        # The mask allowed the token; a matcher that refuses it now could only go on wrongly.
        return not self._matcher.accept(token) or self._matcher.finished
