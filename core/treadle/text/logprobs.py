"""Log probabilities as users see them: by id, with the text that each id would have added."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from treadle.api.step_types import TokenLogprobs
from treadle.outputs import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("LogprobText",)

UTF8Decoder = codecs.getincrementaldecoder("utf-8")


class LogprobText:
    """Names the tokens of one sequence, position by position.

    A token that ends inside a character is shown as what it completes, ``""`` if that is nothing:
    the texts of the chosen tokens concatenate to the output (special tokens included).
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pending = b""

    def position(self, entry: TokenLogprobs) -> PositionLogprobs:
        """One position; ``entry.ids[0]`` was chosen and becomes part of the sequence."""
        sampled_id = entry.ids[0]
        logprobs: PositionLogprobs = {
            sampled_id: Logprob(entry.logprobs[0], entry.rank, self._text(sampled_id))
        }
        for rank, token in enumerate(entry.ids[1:], start=1):
            if token != sampled_id:
                logprobs[token] = Logprob(entry.logprobs[rank], rank, self._text(token))
        self.skip(sampled_id)
        return logprobs

    def skip(self, token: int) -> None:
        """``token`` follows without being named."""
        if self._tokenizer is not None:
            _, self._pending = self._decode(self._tokenizer, token)

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._decode(self._tokenizer, token)[0]

    def _decode(self, tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
        """Return the text that ``token`` completes, and the beginning of a character after it."""
        decoder = UTF8Decoder("replace")
        text = decoder.decode(self._pending + tokenizer.token_bytes(token))
        return text, decoder.getstate()[0]
