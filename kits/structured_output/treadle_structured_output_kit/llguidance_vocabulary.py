"""The attributes that llguidance reads from a tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

from treadle.api.types import Tokenizer

__all__ = ("MAX_TEXT", "MAX_TEXTS", "Vocabulary")

MAX_TEXTS, MAX_TEXT = 4096, 128
"""Texts without a choice whose ids are kept, and the characters of one: every row has the same."""
BEFORE = b"\n"
"""What no tokenizer merges with the text behind it, if it can help it."""


class Vocabulary:
    """The bytes of each id of ``tokenizer``, and of the end, whose id comes after those of the vocabulary."""

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
