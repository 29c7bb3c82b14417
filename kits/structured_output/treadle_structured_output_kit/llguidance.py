"""Grammars compiled by llguidance: one tokenizer for all of them, one parser for each sequence.

Requires the extra ``treadle-structured-output-kit[llguidance]``.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from time import thread_time
from typing import TYPE_CHECKING, Any

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from treadle.api.types import Tokenizer
from treadle_structured_output_kit.bitmask import empty_row, forbid_token, write_row
from treadle_structured_output_kit.gbnf import is_gbnf
from treadle_structured_output_kit.gbnf_lark import gbnf_to_lark
from treadle_structured_output_kit.regex import JSON_WHITESPACE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("LLGuidanceCompiler", "LLGuidanceGrammar", "LLGuidanceMatcher")

DEAD_END = "NoExtensionBias"
"""The library's word for a grammar that allows no token: an error of its, and an empty mask."""
MANY_ROWS, THREADS = 65, 4
"""From how many rows on threads share them, and how many do: to wake one takes as long as several masks."""
MAX_AUTOMATA = 16
MAX_TEXTS, MAX_TEXT = 4096, 128
"""Texts without a choice whose ids are kept, and the characters of one: every row has the same."""
BEFORE = b"\n"
"""What no tokenizer merges with the text behind it, if it can help it."""
MAX_AUTOMATON_SECONDS = 0.01
"""CPU time that compiling a grammar may take so that it gets an automaton for each few sequences."""
MAX_REPLAY_SECONDS = 0.05
"""CPU time that compiling a grammar may take so that a sequence compiles it again inside a step."""


class LLGuidanceCompiler:
    """Compiles grammars for one vocabulary. Immutable, safe in threads.

    Every ``compile_`` method raises ``ValueError`` with the library's words if it refuses.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # The end gets an id of its own after the vocabulary. The ids that really end a sequence are
        # the core's, and any of the model's may be an ordinary token of a grammar.
        wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)

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
        """Do what ``SupportsGrammarBatches`` says."""
        num_rows, num_words = bitmask.shape
        first, size = bitmask.data_ptr(), num_words * 4
        libraries = [matcher.library for matcher in matchers]
        if len(matchers) < MANY_ROWS:
            for library, row in zip(libraries, rows, strict=True):
                library.unsafe_compute_mask_ptr(first + row * size, size)
        else:
            for library in libraries:
                # Where text is forced, the library asks the tokenizer for its ids, which is Python. Each of
                # its threads would wait for the interpreter. It remembers what it was told here.
                library.compute_ff_tokens()
            pairs = [(libraries[i], rows[i]) for i in _in_turn(matchers)]
            self._threads.unsafe_compute_mask_ptr(pairs, first, size, num_rows)
        return [None if x.is_error() else x.is_accepting() for x in libraries]

    def accept_tokens(
        self, matchers: Sequence[LLGuidanceMatcher], tokens: Sequence[int]
    ) -> list[bool | None]:
        """Do what ``SupportsGrammarBatches`` says."""
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
                matcher.tokens.append(tokens[i])
                results[i] = matcher.library.is_stopped() and matcher.library.is_accepting()
        return results

    @cached_property
    def _threads(self) -> LLExecutor:
        """The threads for many rows, made with the first: forks, which compile, have none."""
        return LLExecutor(min(THREADS, os.cpu_count() or 1))

    def _compile(self, source: str) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self._tokenizer, source, self._vocab_size)


class LLGuidanceGrammar:
    """A ``CompiledGrammar``: compiled once, shared by all sequences that use it.

    The library's copies share the automaton of the grammar's tokens, which grows as they run. When
    it reaches a limit, it is of no use to any of them any more. Their own grammars go on then, and
    sequences that come later get a new automaton. Only one of those that share it advances at a
    time: a grammar that costs little has several automata, which take turns.
    """

    def __init__(self, tokenizer: LLTokenizer, source: str, vocab_size: int) -> None:
        self._tokenizer, self._source, self._vocab_size = tokenizer, source, vocab_size
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
        matcher = LLMatcher(self._tokenizer, self._source, log_level=0)
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
        self._grammar, self.library = grammar, matcher
        self.automaton = automaton
        """The number of the automaton that it shares."""
        self._vocab_size = vocab_size
        self._row = empty_row(vocab_size + 1)
        self.tokens: list[int] = []
        self._is_shared = True

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Write the ids that may come next into ``bitmask[row]``."""
        allowed = self._row
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
        accepted: int = self.library.try_consume_tokens([token])
        if self.library.is_error():
            self._start_again()
            return self.accept_token(token)
        if accepted == 1:
            self.tokens.append(token)
        return accepted == 1

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens."""
        if not 0 <= count <= len(self.tokens):
            raise ValueError(f"{count} tokens cannot be undone; there are {len(self.tokens)}")
        del self.tokens[len(self.tokens) - count :]
        if not self.library.rollback(count):
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
        reason = _error_text(self.library)
        if self._is_shared:
            self._grammar.spoil(self.automaton)
        if not self._is_shared or not self._grammar.can_replay:
            raise ValueError(f"llguidance has reached a limit of its own: {reason}")
        self._is_shared = False
        self.library = self._grammar.compile()
        if self.library.try_consume_tokens(self.tokens) != len(self.tokens):
            reason = _error_text(self.library) or reason
            raise ValueError(f"llguidance has reached a limit of its own: {reason}")


def _in_turn(matchers: Sequence[LLGuidanceMatcher]) -> list[int]:
    """Their indices. Threads take neighbours, so that those of one automaton meet no other thread."""
    return sorted(range(len(matchers)), key=[m.automaton for m in matchers].__getitem__)


class _Vocabulary:
    """The attributes that the library reads from a tokenizer: the bytes of each id."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        special = {token for token in tokenizer.special_token_ids if token < vocab_size}
        self.tokens: list[bytes] = []
        for token in range(vocab_size):
            data = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
            if not data:  # a name, which no text has: allowed where a grammar names the id
                special.add(token)
            self.tokens.append(data or b"<[%d]>" % token)
        self.tokens.append(b"<[end]>")
        self.eos_token_id = vocab_size
        self.special_token_ids = [*sorted(special), vocab_size]
        self._special = frozenset(special)
        self._tokenizer = tokenizer
        self._encode = lru_cache(MAX_TEXTS)(self._encode_text)

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode text that a grammar leaves no choice about; the library allows these ids only.

        It is text, also where it reads like a special token.
        """
        return self._encode(text) if len(text) < MAX_TEXT else self._encode_text(text)

    def _encode_text(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode(data.decode("utf-8", "replace"), add_special_tokens=False)
        if not self._special.isdisjoint(ids):
            spelled = ((i,) if i not in self._special else self._spell(self.tokens[i]) for i in ids)
            ids = list(itertools.chain.from_iterable(spelled))
        if self._bytes(ids) == data:
            return ids
        return self._encode_behind(data) or list(self._spell(data))

    def _encode_behind(self, data: bytes) -> list[int]:
        """Encode text as what goes on, for tokenizers that put a space before what begins; empty if none of its
        tokens begins where it does."""
        text = (BEFORE + data).decode("utf-8", "replace")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        for first in range(1, len(ids)):
            if self._special.isdisjoint(ids[first:]) and self._bytes(ids[first:]) == data:
                return ids[first:]
        return []

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[i] for i in ids)

    def _spell(self, text: bytes) -> Iterator[int]:
        """Yield ordinary tokens with the bytes of ``text``, the longest first."""
        while text:
            ends = range(len(text), 0, -1)
            size = next((end for end in ends if text[:end] in self._ordinary), 0)
            if not size:
                return  # no token has this byte: the library encodes the rest
            yield self._ordinary[text[:size]]
            text = text[size:]

    @cached_property
    def _ordinary(self) -> dict[bytes, int]:
        ids = range(self.eos_token_id)
        return {self.tokens[i]: i for i in ids if i not in self._special}


def _error_text(matcher: LLMatcher) -> str:
    """Return the library's message without the parser state that follows it."""
    return str(matcher.get_error()).partition("\n<state>")[0]
