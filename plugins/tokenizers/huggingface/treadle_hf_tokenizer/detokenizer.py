"""Incremental detokenisation: the text that each new token completes."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from treadle_hf_tokenizer.vocabulary import ByteTable

__all__ = ("ByteDetokenizer", "PieceDetokenizer")

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_utf8 = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """The stream of a vocabulary whose tokens are runs of bytes. One per sequence.

    Costs one dictionary look-up and one UTF-8 decoding step per token, whatever came before; text
    leaves as soon as its last byte is there.
    """

    __slots__ = ("_decoder", "_opens", "_skipped", "_table")

    def __init__(
        self, table: ByteTable, skipped: frozenset[int], prompt_ids: Sequence[int]
    ) -> None:
        self._table = table
        self._skipped = skipped
        self._decoder = _utf8("replace")
        self._opens = True
        tail: list[bytes] = []
        for token in reversed(prompt_ids):
            if token not in skipped and (data := table[token]):
                self._opens = False
                tail.append(data)
                if len(tail) == 4:  # a character has at most four bytes
                    break
        # What is whole belongs to the prompt; a character that the prompt left open is ours.
        self._decoder.decode(b"".join(reversed(tail)))

    def decode_next(self, token: int) -> str:
        if token in self._skipped:
            return ""
        if self._opens:
            self._opens = False
            return self._decoder.decode(self._table.first(token))
        return self._decoder.decode(self._table[token])

    def decode_many(self, tokens: Sequence[int]) -> str:
        if not self._skipped.isdisjoint(tokens):
            tokens = [token for token in tokens if token not in self._skipped]
        first = self.decode_next(tokens[0]) if tokens else ""
        return first + self._decoder.decode(b"".join(map(self._table.__getitem__, tokens[1:])))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class PieceDetokenizer:
    """The stream of any other vocabulary, on ``tokenizers``' own ``DecodeStream``. One per sequence.

    ``DecodeStream`` decodes all tokens that it holds back again at each step and raises when a
    decoder rewrites what it said before; both are bounded here.
    """

    __slots__ = ("_backend", "_pending_ids", "_skip", "_stream", "_unspaced", "_was_special")

    MAX_PENDING_IDS = 16
    CONTEXT = 8

    def __init__(
        self,
        backend: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        unspaced: Mapping[int, str],
    ) -> None:
        """``unspaced`` holds the special tokens that follow each other without a space."""
        self._backend = backend
        self._skip = skip_special_tokens
        self._unspaced = unspaced
        self._was_special = False
        self._pending_ids: list[int] = []
        context = list(prompt_ids[-self.CONTEXT :])
        # A context that ends inside a character would come out with the first token.
        while context and backend.decode(context, skip_special_tokens=skip_special_tokens).endswith(
            REPLACEMENT
        ):
            context.pop()
        self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special_tokens)

    def decode_next(self, token: int) -> str:
        self._pending_ids.append(token)
        try:
            text = self._stream.step(self._backend, token)
        except Exception:  # tokenizers raises bare Exception: the decoder rewrote earlier text
            return self._restart()
        if self._unspaced:
            special = token in self._unspaced
            if special and self._was_special:
                text = self._unspaced[token]
            self._was_special = special
        if text is None:
            return self._restart() if len(self._pending_ids) >= self.MAX_PENDING_IDS else ""
        self._pending_ids.clear()
        return text

    def flush(self) -> str:
        return self._restart() if self._pending_ids else ""

    def _restart(self) -> str:
        """Say what is held as it stands, and go on without a memory."""
        text = self._backend.decode(self._pending_ids, skip_special_tokens=self._skip)
        self._pending_ids.clear()
        self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip)
        return text
