"""Grammars compiled by llguidance: one tokenizer for all of them, one parser for each sequence.

Requires the extra ``treadle-structured-output-kit[llguidance]``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
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
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(_error_text(matcher))
        return LLGuidanceGrammar(matcher, self._vocab_size)


class LLGuidanceGrammar:
    """A ``Grammar``: compiled once, shared by all sequences that use it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher  # never advanced
        self._vocab_size = vocab_size

    def matcher(self) -> LLGuidanceMatcher:
        """Return the state of a new sequence."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocab_size)


class LLGuidanceMatcher:
    """A ``Matcher``: the state of one sequence. Raises ``ValueError`` if the library fails."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._row = empty_row(vocab_size + 1)

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Write the ids that may come next into ``bitmask[row]``."""
        allowed = self._row
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error() and _error_text(self._matcher) == DEAD_END:
            allowed.fill(0)
        else:
            self._check()
        forbid_token(allowed, self._vocab_size)
        write_row(bitmask, row, allowed)

    def accept_token(self, token: int) -> bool:
        """Advance; ``False`` (and no change) if the token is not allowed."""
        accepted: int = self._matcher.try_consume_tokens([token])
        self._check()
        return accepted == 1

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens."""
        if not self._matcher.rollback(count):
            raise ValueError(_error_text(self._matcher))

    @property
    def is_accepting(self) -> bool:
        """Whether the sequence may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_terminated(self) -> bool:
        """Whether the sequence must end here."""
        return bool(self._matcher.is_stopped()) and self.is_accepting

    def _check(self) -> None:
        """Raise ``ValueError`` if the matcher is in its error state, which it never leaves.

        That is how the library reports a grammar that exceeds its limits in some step.
        """
        if self._matcher.is_error():
            raise ValueError(_error_text(self._matcher))


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
