"""Log probabilities as users see them: by id, with the text that each id would have added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api.step_types import TokenLogprobs
from treadle.outputs import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("LogprobText",)

UNFINISHED = 3  # a character has at most four bytes


class LogprobText:
    """Names the tokens of one sequence, position by position.

    A token that ends inside a character is shown as what it completes, ``""`` if that is nothing:
    the texts of the chosen tokens concatenate to the output (special tokens included).
    """

    __slots__ = ("_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pending = b""

    def position(self, at: TokenLogprobs) -> PositionLogprobs:
        """One position; ``at.ids[0]`` was chosen and becomes part of the sequence."""
        chosen = at.ids[0]
        found: PositionLogprobs = {chosen: Logprob(at.logprobs[0], at.rank, self._text(chosen))}
        for rank, token in enumerate(at.ids[1:], start=1):
            if token != chosen:
                found[token] = Logprob(at.logprobs[rank], rank, self._text(token))
        self.skip(chosen)
        return found

    def skip(self, token: int) -> None:
        """``token`` follows without being named."""
        if self._tokenizer is not None:
            self._pending = _tail(self._pending + self._tokenizer.token_bytes(token))

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        data = self._pending + self._tokenizer.token_bytes(token)
        tail = _tail(data)
        return data[: len(data) - len(tail)].decode("utf-8", "replace")


def _tail(data: bytes) -> bytes:
    """The end of ``data`` that is the beginning of a character, or ``b""``."""
    for n in range(1, min(UNFINISHED, len(data)) + 1):
        byte = data[-n]
        if byte >= 0xC0:  # a leading byte: how many does its character have?
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[-n:] if n < size else b""
        if byte < 0x80:
            break
    return b""
