"""One sequence inside its grammar."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from treadle.api.structured_output import (
    GrammarMatcher,
    SupportsForcedTokens,
    SupportsGrammarBatches,
)
from treadle.errors import TreadleError
from treadle.plugins.boundary import unwrap
from treadle.processes.failure import is_for_process, strict_error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ("StructuredOutputState", "reason_of")


class StructuredOutputState:
    """A matcher, and the gate before it: while the sequence is reasoning, it may write anything, but not end.

    ``reasoning`` takes each token and tells whether the reasoning goes on after it; ``None`` if the grammar holds
    from the first token. With ``opener`` the reasoning is not open yet: the first token is this one, or one of the
    grammar. ``allowed_ids`` are the only ids that the request allows besides. ``batches`` is the backend of
    ``matcher``, if it advances many together. Once ``error`` says what went wrong, the sequence cannot go on;
    ``error_param`` caused it. A matcher that raises calls ``on_failure``; with ``strict`` it is an ``EngineError``.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        reasoning: Callable[[int], bool] | None = None,
        opener: int | None = None,
        *,
        batches: SupportsGrammarBatches | None = None,
        unenforced: str | None = None,
        allowed_ids: Collection[int] | None = None,
        strict: bool = False,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self._matcher = matcher
        self.matcher: GrammarMatcher = unwrap(matcher)
        """As the backend has built it, for its batches."""
        self._backend, self._reasoning, self._opener = batches, reasoning, opener
        self.batches = batches if reasoning is None else None
        """What advances the matcher together with others, once the grammar reads every token."""
        self._forcing = matcher if isinstance(matcher, SupportsForcedTokens) else None
        self._strict, self._on_failure = strict, on_failure
        self.unenforced = unenforced
        self.allowed_ids = None if allowed_ids is None else np.array(sorted(allowed_ids))
        self.has_ended = False
        """Whether nothing may follow: the output is complete, or there is an ``error``."""
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
        line = mask.numpy().view(np.uint32)[0]
        if self._reasoning is not None and self._opener is None:
            line.fill(0xFFFFFFFF)
            for token in stop_ids:
                line[token >> 5] &= ~np.uint32(1 << (token & 31))
            return
        try:
            self._matcher.fill_bitmask(mask, 0)
            is_accepting = self._matcher.is_accepting
        except BaseException as error:
            line.fill(0)
            self.fail(error)
            return
        self.restrict(line, is_accepting, stop_ids, forbidden_ids)

    def check_first_token(
        self, vocab_size: int, stop_ids: Collection[int], forbidden_ids: Collection[int] = ()
    ) -> None:
        """Set ``error`` if no first token is left; some libraries notice only when asked for it."""
        import torch  # not above: processes that compile grammars come by here without it

        mask = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32)
        self.fill_bitmask(mask, 0, stop_ids, forbidden_ids)

    def restrict(
        self,
        line: NDArray[np.uint32],
        is_accepting: bool,
        stop_ids: Collection[int],
        forbidden_ids: Collection[int],
    ) -> None:
        """Add to ``line``, which the matcher has filled, what else decides about the next token."""
        if is_accepting:
            for token in stop_ids:
                line[token >> 5] |= np.uint32(1 << (token & 31))
        if not line.any():
            self.error, self.error_param, self.has_ended = DEAD_END, "structured_outputs", True
            return
        for token in forbidden_ids:
            line[token >> 5] &= ~np.uint32(1 << (token & 31))
        if self.allowed_ids is not None:
            words, bits = self.allowed_ids >> 5, np.uint32(1) << (self.allowed_ids & 31)
            kept = line[words] & bits.astype(np.uint32)
            line.fill(0)
            np.bitwise_or.at(line, words, kept)
        if (forbidden_ids or self.allowed_ids is not None) and not line.any():
            self.error, self.has_ended = NOTHING_LEFT, True
            if self.allowed_ids is not None:
                self.error_param = "allowed_token_ids"
            else:
                is_end = set(forbidden_ids).issubset(stop_ids)
                self.error_param = "min_tokens" if is_end else "bad_words"
        elif self._opener is not None:
            line[self._opener >> 5] |= np.uint32(1 << (self._opener & 31))

    def accept_token(self, token: int) -> None:
        """The sequence has gained ``token``, which is no stop id."""
        if self._opener is not None:
            if token != self._opener:
                self._reasoning, self.batches = None, self._backend
            self._opener = None
        if self._reasoning is not None:
            try:
                if not self._reasoning(token):
                    self._reasoning, self.batches = None, self._backend
            except BaseException as error:
                self._fail("the reasoning before the grammar failed", error)
            return
        try:
            if self._matcher.accept_token(token):
                self.has_ended = self._matcher.is_terminated
            else:
                self.error = f"the grammar does not allow token {token}, which its mask allowed"
                self.error_param, self.has_ended = "structured_outputs", True
        except BaseException as error:
            self.fail(error)

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow, none where more than the grammar decides about them."""
        if self._forcing is None or self._reasoning is not None or self.allowed_ids is not None:
            return []
        try:
            return self._forcing.forced_tokens()
        except BaseException as error:
            self.fail(error)
            return []

    def fail(self, error: BaseException) -> None:
        """The matcher has raised ``error``: the sequence cannot go on."""
        self._fail("the grammar failed", error, "structured_outputs")

    def _fail(self, context: str, error: BaseException, param: str | None = None) -> None:
        if is_for_process(error):
            raise error
        self.error, self.error_param = f"{context}: {reason_of(error)}", param
        self.has_ended = True
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
