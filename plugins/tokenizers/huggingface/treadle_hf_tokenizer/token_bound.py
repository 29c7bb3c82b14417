"""How few tokens a text can have, known from its length alone.

The bound is the number of UTF-8 bytes over those of the longest token. It holds only if no step of
the tokenizer takes anything away from a text, so that whatever is not known to keep all of it has
no bound: a tokenizer with unknown tokens (which may stand for any length), one that drops spaces,
one with markers that swallow the spaces beside them. Normalizers that change nothing in ASCII, or
make it longer, leave the bound to texts in ASCII.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from treadle_hf_tokenizer.vocabulary import BYTE_OF_CHAR, Alphabet

__all__ = ("TokenBound", "steps", "token_bound")

KEEPING_ASCII = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend")
SPLITTING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")


@dataclass(frozen=True, slots=True)
class TokenBound:
    """``max_token_bytes`` is the length of the longest token. ``only_ascii`` says that other texts
    have no bound."""

    max_token_bytes: int
    only_ascii: bool

    def min_num_tokens(self, text: str) -> int:
        """Return a number that the tokens of ``text`` cannot be fewer than; 0 if none is known."""
        if text.isascii():
            return -(-len(text) // self.max_token_bytes)
        if self.only_ascii:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self.max_token_bytes)


def token_bound(backend: Backend, letters: Alphabet | None) -> TokenBound | None:
    """Return the bound of a tokenizer, ``None`` if it has none. Takes time linear in the vocabulary."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder().values()
    if (
        letters is None
        or not _spells_every_byte(backend, letters, vocabulary)
        or not all(map(_keeps_all, steps(backend.pre_tokenizer, "pretokenizers")))
        or not all(map(_keeps_ascii, steps(backend.normalizer, "normalizers")))
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    lengths = [len(letters.bytes_of(token)) for token in vocabulary]
    lengths += [len(token.content.encode("utf-8", "replace")) for token in added]
    return TokenBound(max(lengths), only_ascii=backend.normalizer is not None)


def _spells_every_byte(backend: Backend, letters: Alphabet, vocabulary: Mapping[str, int]) -> bool:
    """Whether every text can be spelled, so that nothing becomes an unknown token or is dropped."""
    if letters.byte_level:
        parts = steps(backend.pre_tokenizer, "pretokenizers")
        return any(part["type"] == "ByteLevel" for part in parts) and vocabulary.keys() >= set(
            BYTE_OF_CHAR
        )
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    model = backend.model
    return isinstance(model, BPE) and bool(model.byte_fallback) and vocabulary.keys() >= names


def steps(component: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of a tokenizer; a sequence of steps has them under ``name``."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        state = pending.pop()
        if state["type"] == "Sequence":
            pending += state[name]
        else:
            yield state


def _keeps_all(step: Mapping[str, Any]) -> bool:
    return step["type"] in SPLITTING and step.get("behavior") != "Removed"


def _keeps_ascii(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new.encode()) >= len(old.encode())
    return step["type"] in KEEPING_ASCII
