"""Grammars compiled by llguidance: one tokenizer for all of them, one parser for each sequence.

Requires the extra ``treadle-structured-output-kit[llguidance]``.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from treadle.api.types import Tokenizer
from treadle_structured_output_kit.gbnf import is_gbnf
from treadle_structured_output_kit.gbnf_lark import gbnf_to_lark
from treadle_structured_output_kit.llguidance_matcher import LLGuidanceGrammar, LLGuidanceMatcher
from treadle_structured_output_kit.llguidance_vocabulary import Vocabulary
from treadle_structured_output_kit.matcher_pool import MatcherPool
from treadle_structured_output_kit.matcher_process import Setup
from treadle_structured_output_kit.regex import JSON_WHITESPACE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("LLGuidanceCompiler", "LLGuidanceGrammar", "LLGuidanceMatcher")

SOME_ROWS = 16
"""From how many rows on they move to other processes, if there are some: a message takes as long as several masks."""
MANY_ROWS, THREADS = 65, 4
"""From how many rows on threads share them here, and how many do: to wake one takes as long as several masks."""


class LLGuidanceCompiler:
    """Compiles grammars for one vocabulary. Safe in threads.

    Matchers of many rows advance in at most ``max_processes``, and half as many as there are cores, if the masks
    of a step are in shared memory. Every ``compile_`` method raises ``ValueError`` with the library's words if it refuses.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_processes: int = 0) -> None:
        self._vocab_size, self._max_processes = vocab_size, max_processes
        # The end gets an id of its own after the vocabulary. The ids that really end a sequence are
        # the core's, and any of the model's may be an ordinary token of a grammar.
        self._vocabulary = Vocabulary(tokenizer, vocab_size)
        wrapper = TokenizerWrapper(self._vocabulary)
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)
        self._keys = itertools.count()
        self._pool: MatcherPool | None = None

    def compile_json_schema(
        self,
        schema: Mapping[str, Any],
        *,
        whitespace_pattern: str = JSON_WHITESPACE,
        lenient: bool = False,
    ) -> LLGuidanceGrammar:
        """Compile a JSON schema. ``lenient`` ignores keywords that cannot be enforced."""
        # The library reads options from the schema, but they are the server's to choose.
        schema = {key: value for key, value in schema.items() if key != "x-guidance"}
        options: Any = {"lenient": lenient, "whitespace_pattern": whitespace_pattern}
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        return self._compile(str(source))

    def compile_regex(self, pattern: str) -> LLGuidanceGrammar:
        """Compile a regular expression that the whole output must match."""
        return self._compile(str(LLMatcher.grammar_from_regex(pattern)))

    def compile_grammar(self, grammar: str) -> LLGuidanceGrammar:
        """Compile a context-free grammar in Lark, or in GBNF, whose rules are written ``::=``."""
        lark = gbnf_to_lark(grammar) if is_gbnf(grammar) else grammar
        return self._compile(str(LLMatcher.grammar_from_lark(lark)))

    def fill_bitmasks(
        self, matchers: Sequence[LLGuidanceMatcher], bitmask: Tensor, rows: Sequence[int]
    ) -> list[bool | None]:
        """Do what ``SupportsGrammarBatches`` says, in other processes if they can write the masks."""
        if self._pool is None and self._max_processes and bitmask.is_shared():
            words = self._vocabulary
            setup = Setup(words.tokens, words.special_token_ids)
            self._pool = MatcherPool(setup, words, bitmask, self._max_processes)
        pool = self._pool
        if pool is None or pool.bitmask_at != bitmask.data_ptr():
            return self._fill_here(matchers, bitmask, rows)
        if not matchers:
            pool.settle()
            return []
        if len(matchers) >= SOME_ROWS:
            for matcher in matchers:
                if matcher.place is None:
                    matcher.move_to(pool)
        results = pool.fill_bitmasks([matcher.place for matcher in matchers], rows)
        return _completed(results, matchers, rows, lambda m, r: self._fill_here(m, bitmask, r))

    def accept_tokens(
        self, matchers: Sequence[LLGuidanceMatcher], tokens: Sequence[int]
    ) -> list[bool | None]:
        """Do what ``SupportsGrammarBatches`` says."""
        if self._pool is None:
            return self._accept_here(matchers, tokens)
        results = self._pool.accept_tokens([matcher.place for matcher in matchers], tokens)
        for matcher, token, result in zip(matchers, tokens, results, strict=True):
            if result is not None:
                matcher.tokens.append(token)
        return _completed(results, matchers, tokens, self._accept_here)

    def _fill_here(
        self, matchers: Sequence[LLGuidanceMatcher], bitmask: Tensor, rows: Sequence[int]
    ) -> list[bool | None]:
        num_rows, num_words = bitmask.shape
        first, size = bitmask.data_ptr(), num_words * 4
        libraries = [matcher.library for matcher in matchers]
        if len(matchers) < MANY_ROWS:
            for library, row in zip(libraries, rows, strict=True):
                library.unsafe_compute_mask_ptr(first + row * size, size)
        else:
            pairs = [(libraries[i], rows[i]) for i in _in_turn(matchers)]
            self._threads.unsafe_compute_mask_ptr(pairs, first, size, num_rows)
        return [None if x.is_error() else x.is_accepting() for x in libraries]

    def _accept_here(
        self, matchers: Sequence[LLGuidanceMatcher], tokens: Sequence[int]
    ) -> list[bool | None]:
        order: Sequence[int] = range(len(matchers))
        if len(matchers) < MANY_ROWS:
            accepted = [m.library.consume_token(t) for m, t in zip(matchers, tokens, strict=True)]
        else:
            order = _in_turn(matchers)
            pairs = [(matchers[i].library, tokens[i]) for i in order]
            accepted = self._threads.consume_token_par(pairs)
        results: list[bool | None] = [None] * len(matchers)
        for i, is_accepted in zip(order, accepted, strict=True):
            if is_accepted:
                matcher = matchers[i]
                matcher.advance(tokens[i])
                results[i] = matcher.library.is_stopped() and matcher.library.is_accepting()
        return results

    @cached_property
    def _threads(self) -> LLExecutor:
        """The threads for many rows, made with the first: forks, which compile, have none."""
        return LLExecutor(min(THREADS, os.cpu_count() or 1))

    def _compile(self, source: str) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self._tokenizer, source, self._vocab_size, next(self._keys))


def _completed(
    results: list[bool | None],
    matchers: Sequence[LLGuidanceMatcher],
    values: Sequence[int],
    here: Callable[[list[LLGuidanceMatcher], list[int]], list[bool | None]],
) -> list[bool | None]:
    """Return ``results``, and for matchers in no other process those of ``here``. What fails there comes here."""
    if None not in results:
        return results
    rest = [i for i, matcher in enumerate(matchers) if matcher.place is None]
    for matcher, result in zip(matchers, results, strict=True):
        if result is None and matcher.place is not None:
            matcher.stay()
    if rest:
        found = here([matchers[i] for i in rest], [values[i] for i in rest])
        for i, result in zip(rest, found, strict=True):
            results[i] = result
    return results


def _in_turn(matchers: Sequence[LLGuidanceMatcher]) -> list[int]:
    """Their indices. Threads take neighbours, so that those of one automaton meet no other thread."""
    return sorted(range(len(matchers)), key=[m.automaton for m in matchers].__getitem__)
