"""What outlines-core has no automaton for, and outlines leaves to llguidance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from treadle.api.types import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("Grammars",)

WHITESPACE = r"[ \t]|\r?\n[ \t]{0,64}"


class Grammars:
    """Context-free grammars (Lark, GBNF) and JSON of any depth. Immutable."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)

    def lark(self, text: str) -> _Grammar:
        lark = str(any_to_lark(text)) if "::=" in text else text
        return self._compiled(LLMatcher.grammar_from_lark(lark))

    def json_object(self, whitespace: str | None) -> _Grammar:
        options: Any = {"whitespace_pattern": whitespace or WHITESPACE}
        return self._compiled(
            LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=options)
        )

    def _compiled(self, source: str) -> _Grammar:
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(_said(matcher))
        return _Grammar(matcher, self._vocab_size)


class _Vocabulary:
    """What the library asks of a tokenizer: the bytes of each id, and an end behind all of them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        special = {token for token in tokenizer.special_ids if token < vocab_size}
        self.tokens: list[bytes] = []
        for token in range(vocab_size):
            data = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
            if not data:
                special.add(token)
            self.tokens.append(data or b"<[%d]>" % token)
        self.tokens.append(b"<[end]>")
        self.eos_token_id = vocab_size
        self.special_token_ids = [*sorted(special), vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special_tokens=False)


class _Grammar:
    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher  # never advanced
        self._vocab_size = vocab_size

    def matcher(self) -> _Matcher:
        return _Matcher(self._matcher.deep_copy(), self._vocab_size)


class _Matcher:
    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._line = np.zeros(vocab_size // 32 + 1, dtype=np.uint32)

    def fill(self, bitmask: Tensor, row: int) -> None:
        line = self._line
        self._matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        self._check()
        line[self._vocab_size >> 5] &= ~np.uint32(1 << (self._vocab_size & 31))
        bitmask[row].numpy().view(np.uint32)[:] = line[: bitmask.shape[1]]

    def accept(self, token: int) -> bool:
        accepted: int = self._matcher.try_consume_tokens([token])
        self._check()
        return accepted == 1

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped()) and self.complete

    def _check(self) -> None:
        if self._matcher.is_error():  # it never leaves this state
            raise ValueError(_said(self._matcher))


def _said(matcher: LLMatcher) -> str:
    """The library's words, without the state of its parser that follows them."""
    return str(matcher.get_error()).partition("\n<state>")[0]
