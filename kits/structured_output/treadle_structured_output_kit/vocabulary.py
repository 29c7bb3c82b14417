"""The part of a vocabulary that grammars are made of."""

from __future__ import annotations

from treadle.api.types import Tokenizer

__all__ = ("text_tokens",)


def text_tokens(tokenizer: Tokenizer, vocab_size: int) -> dict[int, bytes]:
    """Return the bytes of each token id below ``vocab_size`` that writes text.

    Special tokens and ids without bytes are left out.
    """
    special = tokenizer.special_token_ids
    return {
        token: data
        for token in range(min(vocab_size, tokenizer.vocab_size))
        if token not in special and (data := tokenizer.token_bytes(token))
    }
