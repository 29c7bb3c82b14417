"""A grammar, and checks of the values that it cannot hold."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from treadle.api.types import Tokenizer
from treadle_structured_output_kit.bitmask import forbid_token
from treadle_structured_output_kit.llguidance import LLGuidanceGrammar, LLGuidanceMatcher
from treadle_structured_output_kit.value_checks import ValueChecks, ValueState

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("CheckedGrammar", "TokenTexts")


WHOLE = re.compile(rb'\[.*[\],]|".*"', re.DOTALL)


class TokenTexts:
    """The bytes of all tokens, read when they are first needed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    @cached_property
    def of(self) -> list[bytes]:
        ids = range(min(self._vocab_size, self._tokenizer.vocab_size))
        return [self._tokenizer.token_bytes(token) for token in ids]

    @cached_property
    def has_quote(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """A mark for each id of a bitmask's words."""
        marks = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.uint8)
        marks[[token for token, text in enumerate(self.of) if b'"' in text]] = 1
        return marks

    @cached_property
    def is_whole(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Which tokens may open a value and close it, or an item of it."""
        return np.array([WHOLE.search(text) is not None for text in self.of], dtype=np.uint8)


class CheckedGrammar:
    """A ``CompiledGrammar`` whose masks leave out what would close a value that fails its check."""

    def __init__(self, grammar: LLGuidanceGrammar, checks: ValueChecks, texts: TokenTexts) -> None:
        self._grammar, self._checks, self._texts = grammar, checks, texts

    def matcher(self) -> _Matcher:
        return _Matcher(self._grammar.matcher(), self._checks, self._texts)


class _Matcher:
    def __init__(self, matcher: LLGuidanceMatcher, checks: ValueChecks, texts: TokenTexts) -> None:
        self._matcher, self._checks, self._texts = matcher, checks, texts
        self._text = bytearray()
        self._states = [(0, ValueState())]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        self._matcher.fill_bitmask(bitmask, row)
        state = self._states[-1][1]
        words = bitmask[row].numpy().view(np.uint32)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")
        if not state.is_checked:  # only a token that also opens the value can close one
            whole = self._texts.is_whole
            allowed = allowed[: len(whole)] & whole[: len(allowed)]
        # Inside a text only its end closes a value, unless the texts that may come are listed.
        elif state.mode in ("string", "name") and not any("enum" in s for s in state.schemas):
            allowed = allowed[: len(self._texts.has_quote)] & self._texts.has_quote[: len(allowed)]
        for token in np.flatnonzero(allowed).tolist():
            if self._after(self._bytes(token)) is None:
                forbid_token(words, token)

    def accept_token(self, token: int) -> bool:
        data = self._bytes(token)
        state = self._after(data)
        if state is None or not self._matcher.accept_token(token):
            return False
        self._text += data
        self._states.append((len(self._text), state))
        return True

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        del self._states[len(self._states) - count :]
        del self._text[self._states[-1][0] :]

    @property
    def is_accepting(self) -> bool:
        return self._matcher.is_accepting

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated

    def _bytes(self, token: int) -> bytes:
        texts = self._texts.of
        return texts[token] if token < len(texts) else b""

    def _after(self, data: bytes) -> ValueState | None:
        """The state after ``data``, if no check fails."""
        length = len(self._text)
        self._text += data
        try:
            return self._checks.advance(self._states[-1][1], self._text, length)
        except (ValueError, IndexError):
            return None  # the grammar does not allow it either
        finally:
            del self._text[length:]
