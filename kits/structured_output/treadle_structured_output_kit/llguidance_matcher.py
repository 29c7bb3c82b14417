"""Grammars that llguidance has compiled, and the state of a sequence in one."""

from __future__ import annotations

import itertools
import os
import threading
from time import thread_time
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from treadle_structured_output_kit.bitmask import empty_row, forbid_token, write_row
from treadle_structured_output_kit.matcher_pool import MatcherPool, Place

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("LLGuidanceGrammar", "LLGuidanceMatcher")

DEAD_END = "NoExtensionBias"
"""The library's word for a grammar that allows no token: an error of its, and an empty mask."""
MAX_AUTOMATA = 16
MAX_AUTOMATON_SECONDS = 0.01
"""CPU time that compiling a grammar may take so that it gets an automaton for each few sequences."""
MAX_REPLAY_SECONDS = 0.05
"""CPU time that compiling a grammar may take so that it is compiled again inside a step."""


class LLGuidanceGrammar:
    """A ``CompiledGrammar``: compiled once, shared by all sequences that use it.

    The library's copies share the automaton of the grammar's tokens, which grows as they run. When
    it reaches a limit, it is of no use to any of them any more. Their own grammars go on then, and
    sequences that come later get a new automaton. Only one of those that share it advances at a
    time: a grammar that costs little has several automata, which take turns.
    """

    def __init__(self, tokenizer: LLTokenizer, source: str, vocab_size: int, key: int) -> None:
        self._tokenizer, self.source, self._vocab_size = tokenizer, source, vocab_size
        self.key = key
        """Its number among the grammars of its compiler."""
        start = thread_time()
        first = self.compile()
        seconds = thread_time() - start
        self.can_replay = seconds < MAX_REPLAY_SECONDS
        count = min(MAX_AUTOMATA, os.cpu_count() or 1) if seconds < MAX_AUTOMATON_SECONDS else 1
        self._automata: list[LLMatcher | None] = [first, *[None] * (count - 1)]
        self._turns = itertools.cycle(range(count))
        self._lock = threading.Lock()

    def compile(self) -> LLMatcher:
        """Return a matcher that shares nothing with any other."""
        matcher = LLMatcher(self._tokenizer, self.source, log_level=0)
        if matcher.is_error():
            raise ValueError(_error_text(matcher))
        return matcher

    def matcher(self) -> LLGuidanceMatcher:
        """Return the state of a new sequence."""
        with self._lock:
            turn = next(self._turns)
            automaton = self._automata[turn] = self._automata[turn] or self.compile()
            return LLGuidanceMatcher(self, turn, automaton.deep_copy(), self._vocab_size)

    def spoil(self, automaton: int) -> None:
        """A copy has reached a limit: sequences that come later need another automaton."""
        self._automata[automaton] = None


class LLGuidanceMatcher:
    """A ``GrammarMatcher``: the state of one sequence.

    Where the library fails, its output is read again by a matcher of its own: what others have
    written does not count there. Raises ``ValueError`` if that fails too.
    """

    def __init__(
        self, grammar: LLGuidanceGrammar, automaton: int, matcher: LLMatcher, vocab_size: int
    ) -> None:
        self._grammar, self._library = grammar, matcher
        self.automaton = automaton
        """The number of the automaton that it shares."""
        self.place: Place | None = None
        """Where it advances together with others, if that is another process."""
        self._may_move = grammar.can_replay
        self._vocab_size = vocab_size
        self.tokens: list[int] = []
        """All that were accepted, the last of them perhaps in the other process alone."""
        self._num_read = 0
        self._failure: str | None = None
        self._is_shared = True

    @property
    def library(self) -> LLMatcher:
        """The library's matcher, which has read all tokens. Raises ``ValueError`` if it has cost a process."""
        if self._failure is not None:
            raise ValueError(f"llguidance ended or hung in a process of its own: {self._failure}")
        if self._num_read != len(self.tokens):
            behind, self._num_read = self.tokens[self._num_read :], len(self.tokens)
            if self._library.try_consume_tokens(behind) != len(behind):
                self._start_again()
        return self._library

    def advance(self, token: int) -> None:
        """``library`` has read a token."""
        self.tokens.append(token)
        self._num_read += 1

    def move_to(self, pool: MatcherPool) -> None:
        """Advance in another process from now on, if there is one, and the grammar is soon compiled there."""
        if self._may_move:
            self.place = pool.place(self._grammar.key, self._grammar.source, self.tokens)

    def stay(self) -> None:
        """Advance in this process from now on, unless that would cost it as much as the other one."""
        self._failure = self.place.failure if self.place is not None else None
        self.place, self._may_move = None, False

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Write the ids that may come next into ``bitmask[row]``."""
        allowed = empty_row(self._vocab_size + 1)
        self.library.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self.library.is_error() and _error_text(self.library) == DEAD_END:
            allowed.fill(0)
        elif self.library.is_error():
            self._start_again()
            self.fill_bitmask(bitmask, row)
            return
        forbid_token(allowed, self._vocab_size)
        write_row(bitmask, row, allowed)

    def accept_token(self, token: int) -> bool:
        """Advance; ``False`` (and no change) if the token is not allowed."""
        library, self.place = self.library, None  # the other process does not hear of it
        accepted: int = library.try_consume_tokens([token])
        if self.library.is_error():
            self._start_again()
            return self.accept_token(token)
        if accepted == 1:
            self.advance(token)
        return accepted == 1

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens."""
        if not 0 <= count <= len(self.tokens):
            raise ValueError(f"{count} tokens cannot be undone; there are {len(self.tokens)}")
        library, self.place = self.library, None
        del self.tokens[len(self.tokens) - count :]
        self._num_read = len(self.tokens)
        if not library.rollback(count):
            self._start_again()

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must follow. Masks allow no other spelling of a text without a choice."""
        return list(self.library.compute_ff_tokens())

    @property
    def is_accepting(self) -> bool:
        """Whether the sequence may end here."""
        return bool(self.library.is_accepting())

    @property
    def is_terminated(self) -> bool:
        """Whether the sequence must end here."""
        return bool(self.library.is_stopped()) and self.is_accepting

    def _start_again(self) -> None:
        """Read the output again with a matcher that shares nothing, once.

        The library's matcher never leaves its error state, which is also how it reports a limit.
        """
        reason = _error_text(self._library)
        if self._is_shared:
            self._grammar.spoil(self.automaton)
        if not self._is_shared or not self._grammar.can_replay:
            raise ValueError(f"llguidance has reached a limit of its own: {reason}")
        self._is_shared, self._num_read = False, len(self.tokens)
        self._library = self._grammar.compile()
        if self._library.try_consume_tokens(self.tokens) != len(self.tokens):
            reason = _error_text(self._library) or reason
            raise ValueError(f"llguidance has reached a limit of its own: {reason}")


def _error_text(matcher: LLMatcher) -> str:
    """Return the library's message without the parser state that follows it."""
    return str(matcher.get_error()).partition("\n<state>")[0]
