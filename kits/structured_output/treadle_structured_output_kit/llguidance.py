"""Grammars compiled by llguidance: one tokenizer for all of them, one parser for each sequence.

Requires the extra ``treadle-structured-output-kit[llguidance]``.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from time import thread_time
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from treadle.api.types import Tokenizer
from treadle_structured_output_kit.bitmask import empty_row, forbid_token, write_row
from treadle_structured_output_kit.regex import JSON_WHITESPACE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("LLGuidanceCompiler", "LLGuidanceGrammar", "LLGuidanceMatcher")

DEAD_END = "NoExtensionBias"
"""The library's word for a grammar that allows no token: an error of its, and an empty mask."""
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
        lark = str(any_to_lark(grammar)) if "::=" in grammar else grammar
        return self._compile(str(LLMatcher.grammar_from_lark(lark)))

    def _compile(self, source: str) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self._tokenizer, source, self._vocab_size)


class LLGuidanceGrammar:
    """A ``CompiledGrammar``: compiled once, shared by all sequences that use it.

    The library's copies share the automaton of the grammar's tokens, which grows as they run. When
    it reaches a limit, it is of no use to any of them any more. Their own grammars go on then, and
    sequences that come later get a new automaton.
    """

    def __init__(self, tokenizer: LLTokenizer, source: str, vocab_size: int) -> None:
        self._tokenizer, self._source, self._vocab_size = tokenizer, source, vocab_size
        start = thread_time()
        self._matcher = self.compile()
        self.can_replay = thread_time() - start < MAX_REPLAY_SECONDS
        self._is_spoiled = False
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
            if self._is_spoiled:
                self._matcher, self._is_spoiled = self.compile(), False
            return LLGuidanceMatcher(self, self._matcher.deep_copy(), self._vocab_size)

    def spoil(self) -> None:
        """A copy has reached a limit: sequences that come later need another automaton."""
        self._is_spoiled = True


class LLGuidanceMatcher:
    """A ``GrammarMatcher``: the state of one sequence.

    Where the library fails, its output is read again by a matcher of its own: what others have
    written does not count there. Raises ``ValueError`` if that fails too.
    """

    def __init__(self, grammar: LLGuidanceGrammar, matcher: LLMatcher, vocab_size: int) -> None:
        self._grammar, self._matcher = grammar, matcher
        self._vocab_size = vocab_size
        self._row = empty_row(vocab_size + 1)
        self._tokens: list[int] = []
        self._is_shared = True

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Write the ids that may come next into ``bitmask[row]``."""
        allowed = self._row
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error() and _error_text(self._matcher) == DEAD_END:
            allowed.fill(0)
        elif self._matcher.is_error():
            self._start_again()
            self.fill_bitmask(bitmask, row)
            return
        forbid_token(allowed, self._vocab_size)
        write_row(bitmask, row, allowed)

    def accept_token(self, token: int) -> bool:
        """Advance; ``False`` (and no change) if the token is not allowed."""
        accepted: int = self._matcher.try_consume_tokens([token])
        if self._matcher.is_error():
            self._start_again()
            return self.accept_token(token)
        if accepted == 1:
            self._tokens.append(token)
        return accepted == 1

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens."""
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"{count} tokens cannot be undone; there are {len(self._tokens)}")
        del self._tokens[len(self._tokens) - count :]
        if not self._matcher.rollback(count):
            self._start_again()

    @property
    def is_accepting(self) -> bool:
        """Whether the sequence may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_terminated(self) -> bool:
        """Whether the sequence must end here."""
        return bool(self._matcher.is_stopped()) and self.is_accepting

    def _start_again(self) -> None:
        """Read the output again with a matcher that shares nothing, once.

        The library's matcher never leaves its error state, which is also how it reports a limit.
        """
        reason = _error_text(self._matcher)
        if self._is_shared:
            self._grammar.spoil()
        if not self._is_shared or not self._grammar.can_replay:
            raise ValueError(f"llguidance has reached a limit of its own: {reason}")
        self._is_shared = False
        self._matcher = self._grammar.compile()
        if self._matcher.try_consume_tokens(self._tokens) != len(self._tokens):
            reason = _error_text(self._matcher) or reason
            raise ValueError(f"llguidance has reached a limit of its own: {reason}")


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

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode text that a grammar leaves no choice about; the library allows these ids only.

        It is text, also where it reads like a special token.
        """
        decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        ids = self._tokenizer.encode(decoded, add_special_tokens=False)
        if self._special.isdisjoint(ids):
            return ids
        spelled = ((i,) if i not in self._special else self._spell(self.tokens[i]) for i in ids)
        return list(itertools.chain.from_iterable(spelled))

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
