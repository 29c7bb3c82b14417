"""One sequence inside its grammar."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from treadle.api.structured_output import GrammarMatcher
from treadle.errors import TreadleError
from treadle.plugins.guard import NOT_CAUGHT, strict_error

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("StructuredOutputState", "reason_of")


class StructuredOutputState:
    """A matcher, and the gate before it: while the sequence is reasoning, it may write anything,
    but not end.

    ``reasoning`` takes each token and tells whether the reasoning goes on after it; ``None`` if
    the grammar holds from the first token. With ``opener`` the reasoning is not open yet: the first
    token is this one, or one of the grammar. ``allowed_ids`` are the only ids that the request
    allows besides. Once ``error`` says what went wrong, the sequence cannot go on; ``error_param``
    caused it. A matcher that raises calls ``on_failure``; with ``strict`` it is an ``EngineError``.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        reasoning: Callable[[int], bool] | None = None,
        opener: int | None = None,
        *,
        allowed_ids: Collection[int] | None = None,
        strict: bool = False,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._matcher = matcher
        self._reasoning = reasoning
        self._opener = opener
        self._strict, self._on_failure = strict, on_failure
        self._allowed_ids = None if allowed_ids is None else np.array(sorted(allowed_ids))
        self.error: str | None = None
        self.error_param: str | None = None

    def fill_bitmask(
        self,
        bitmask: Tensor,
        row: int,
        stop_ids: Collection[int],
        forbidden_ids: Collection[int] = (),
    ) -> None:
        """Write the allowed ids of the next token into ``bitmask[row]``, as ``GrammarMatcher.fill_bitmask`` does.

        ``stop_ids`` are allowed exactly if the output is complete, ``forbidden_ids`` never. With
        ``error`` nothing is.
        """
        mask = bitmask[row : row + 1]  # a matcher cannot write into the rows of others
        if self._reasoning is not None and self._opener is None:
            line = mask.numpy().view(np.uint32)[0]
            line.fill(0xFFFFFFFF)
            for token in stop_ids:
                line[token >> 5] &= ~np.uint32(1 << (token & 31))
            return
        self._fill(mask, stop_ids, forbidden_ids)
        if self.error is not None:
            mask.zero_()

    def _fill(
        self, mask: Tensor, stop_ids: Collection[int], forbidden_ids: Collection[int]
    ) -> None:
        try:
            self._matcher.fill_bitmask(mask, 0)
            is_accepting = self._matcher.is_accepting
        except NOT_CAUGHT:
            raise
        except BaseException as error:
            self._fail("the grammar failed", error, "structured_outputs")
            return
        line = mask.numpy().view(np.uint32)[0]
        if is_accepting:
            for token in stop_ids:
                line[token >> 5] |= np.uint32(1 << (token & 31))
        if not line.any():
            self.error, self.error_param = DEAD_END, "structured_outputs"
            return
        for token in forbidden_ids:
            line[token >> 5] &= ~np.uint32(1 << (token & 31))
        if self._allowed_ids is not None:
            words, bits = self._allowed_ids >> 5, np.uint32(1) << (self._allowed_ids & 31)
            kept = line[words] & bits.astype(np.uint32)
            line.fill(0)
            np.bitwise_or.at(line, words, kept)
        if not line.any():
            self.error = NOTHING_LEFT
            if self._allowed_ids is not None:
                self.error_param = "allowed_token_ids"
            else:
                is_end = set(forbidden_ids).issubset(stop_ids)
                self.error_param = "min_tokens" if is_end else "bad_words"
        if self._opener is not None:
            line[self._opener >> 5] |= np.uint32(1 << (self._opener & 31))

    def accept_token(self, token: int) -> bool:
        """The sequence has gained ``token``, which is no stop id. ``True`` if it must end here:
        the output is complete and nothing may follow, or there is an ``error``."""
        if self._opener is not None:
            if token != self._opener:
                self._reasoning = None
            self._opener = None
        if self._reasoning is not None:
            return self._reason(self._reasoning, token)
        try:
            if not self._matcher.accept_token(token):
                self.error = f"the grammar does not allow token {token}, which its mask allowed"
                self.error_param = "structured_outputs"
                return True
            return self._matcher.is_terminated
        except NOT_CAUGHT:
            raise
        except BaseException as error:
            self._fail("the grammar failed", error, "structured_outputs")
            return True

    def _reason(self, is_reasoning: Callable[[int], bool], token: int) -> bool:
        try:
            if not is_reasoning(token):
                self._reasoning = None
        except NOT_CAUGHT:
            raise
        except BaseException as error:
            self._fail("the reasoning before the grammar failed", error)
        return self.error is not None

    def _fail(self, context: str, error: BaseException, param: str | None = None) -> None:
        self.error, self.error_param = f"{context}: {reason_of(error)}", param
        if self._strict:
            raise strict_error(self.error) from error
        self._on_failure()


def reason_of(error: BaseException) -> str:
    """Its words, which an error that is not treadle's does not begin with its name."""
    return str(error) if isinstance(error, TreadleError) else f"{type(error).__name__}: {error}"


DEAD_END = (
    "the grammar has come to a dead end: no token of the model continues the output; choose another "
    "guided_decoding_backend, or another grammar"
)
NOTHING_LEFT = (
    "the grammar allows no token here that allowed_token_ids, bad_words and min_tokens leave; change "
    "one of them, or the grammar"
)
