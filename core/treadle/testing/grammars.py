"""Random texts of a grammar: outputs that a model could generate under it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.structured_output import GrammarMatcher, GrammarSpec

if TYPE_CHECKING:
    from treadle.plugins import PluginManager

__all__ = ("ByteTokenizer", "sample_texts")

LONGEST = 4000


class ByteTokenizer:
    """A tokenizer whose ids are the 256 bytes, and then special tokens."""

    eos_token_id = None
    chat_template = None

    def __init__(self, *special: str) -> None:
        self.special = {256 + i: mark for i, mark in enumerate(special)}
        self.special_token_ids = frozenset(self.special)
        self.vocab_size = 256 + len(special)

    def id_to_token(self, token: int) -> str:
        return self.special.get(token) or bytes([token]).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self.special[token].encode() if token in self.special else bytes([token])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        visible_ids = [i for i in ids if not skip_special_tokens or i not in self.special]
        return b"".join(map(self.token_bytes, visible_ids)).decode("utf-8", "replace")


def sample_texts(
    plugins: PluginManager,
    spec: GrammarSpec,
    count: int,
    *,
    tokenizer: Any = None,
    backend: str = "llguidance",
    endings: Sequence[str] = (),
) -> Iterator[str]:
    """Return ``count`` complete texts of the grammar, the same ones in every run.

    ``endings`` are longer texts that end something in it, which single letters would seldom spell.
    """
    tokenizer = tokenizer or ByteTokenizer()
    compiler = plugins.create(
        STRUCTURED_OUTPUT, backend, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    refusal = compiler.unsupported_reason(spec)
    assert refusal is None, f"{backend} refuses it: {refusal}"
    grammar = compiler.compile(spec)
    for seed in range(count):
        ids = _walk(grammar.matcher(), tokenizer.vocab_size, random.Random(seed), endings)
        yield tokenizer.decode(ids, skip_special_tokens=False)


def _walk(
    matcher: GrammarMatcher, vocab_size: int, draw: random.Random, endings: Sequence[str]
) -> list[int]:
    import torch

    mask = torch.zeros((1, (vocab_size + 31) // 32), dtype=torch.int32)
    ends = set(b'"}])</')
    ids: list[int] = []
    planned: list[int] = []
    while not matcher.is_terminated:
        matcher.fill_bitmask(mask, 0)
        words = [word & 0xFFFFFFFF for word in mask[0].tolist()]
        allowed = [i for i in range(vocab_size) if words[i >> 5] >> (i & 31) & 1]
        if matcher.is_accepting and (not allowed or draw.random() < 0.5):
            break
        assert allowed, "the grammar has come to a dead end"
        # Letters and ends now and then, or a walk would seldom leave a string.
        candidates = [i for i in allowed if i in ends] if draw.random() < 0.3 else []
        if endings and not planned and draw.random() < 0.1:
            planned = list(draw.choice(endings).encode())
        if planned and planned[0] in allowed:
            token = planned.pop(0)
        else:
            planned = []
            token = draw.choice(candidates or [i for i in allowed if i < 128] or allowed)
        assert matcher.accept_token(token), "the grammar refuses what its mask allows"
        ids.append(token)
        assert len(ids) < LONGEST, "the grammar does not come to an end"
    return ids
