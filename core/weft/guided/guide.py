"""One sequence inside its grammar."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from weft.api.guided import Matcher
from weft.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("Guide",)

# A panic of a Rust library is no Exception, and must cost nobody but its request; these two are
# meant for the process.
PASSED = (KeyboardInterrupt, SystemExit)


class Guide:
    """A matcher, and the gate before it: while the sequence is reasoning, it may write anything,
    but not end.

    ``reasoning`` takes each token and tells whether the reasoning goes on after it; ``None`` if
    the grammar holds from the first token. With ``opener`` the reasoning is not open yet: the first
    token is this one, or one of the grammar. Once ``error`` says what went wrong in the matcher,
    the sequence cannot go on; with ``strict`` a matcher that raises is an ``EngineError``.
    """

    def __init__(
        self,
        matcher: Matcher,
        reasoning: Callable[[int], bool] | None = None,
        opener: int | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self._matcher = matcher
        self._reasoning = reasoning
        self._opener = opener
        self._strict = strict
        self.error: str | None = None

    def fill(self, bitmask: Tensor, row: int, stop_ids: Collection[int]) -> None:
        """Write the allowed ids of the next token into ``bitmask[row]``, as ``Matcher.fill`` does.

        ``stop_ids`` are allowed exactly if the output is complete. With ``error`` nothing is.
        """
        try:
            self._fill(bitmask, row, stop_ids)
        except BaseException as error:
            if isinstance(error, PASSED):
                raise
            self.error = self._said(error)
        if self.error is not None:
            bitmask[row].zero_()

    def _fill(self, bitmask: Tensor, row: int, stop_ids: Collection[int]) -> None:
        line = bitmask[row].numpy().view(np.uint32)
        if self._reasoning is not None and self._opener is None:
            line.fill(0xFFFFFFFF)
            for token in stop_ids:
                line[token >> 5] &= ~np.uint32(1 << (token & 31))
            return
        self._matcher.fill(bitmask, row)
        if self._matcher.complete:
            for token in stop_ids:
                line[token >> 5] |= np.uint32(1 << (token & 31))
        elif not line.any():
            self.error = DEAD_END
        if self._opener is not None:
            line[self._opener >> 5] |= np.uint32(1 << (self._opener & 31))

    def advance(self, token: int) -> bool:
        """The sequence has gained ``token``, which is no stop id. ``True`` if it must end here:
        the output is complete and nothing may follow, or there is an ``error``."""
        try:
            if self._opener is not None:
                if token != self._opener:
                    self._reasoning = None
                self._opener = None
            if self._reasoning is not None:
                if not self._reasoning(token):
                    self._reasoning = None
                return False
            if not self._matcher.accept(token):
                self.error = f"the grammar does not allow token {token}, which its mask allowed"
                return True
            return self._matcher.finished
        except BaseException as error:
            if isinstance(error, PASSED):
                raise
            self.error = self._said(error)
            return True

    def _said(self, error: BaseException) -> str:
        text = f"the grammar failed: {type(error).__name__}: {error}"
        if self._strict:
            raise EngineError(f"{text} (plugin_strict makes it fatal)") from error
        return text


DEAD_END = (
    "the grammar has come to a dead end: no token of the model continues the output; choose another "
    "guided_decoding_backend, or another grammar"
)
