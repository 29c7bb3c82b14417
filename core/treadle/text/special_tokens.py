"""Special tokens that parsers must see, and that nobody else should.

Special tokens are left out of an output's text. Some formats are written with them (Mistral's ``[TOOL_CALLS]``): then
the engine is asked for all of them, and those that no parser named are removed here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("SpecialTokenFilter",)


class SpecialTokenFilter:
    """Removes the texts of the tokens ``hidden`` from the text of one output.

    Only where such a token was generated: the same characters, written with other tokens, are text
    (of two in one piece, the first is taken for the token's). A text may come later than its id,
    because it may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._expected: list[str] = []
        self.pending = ""

    def feed(self, text: str, ids: Sequence[int]) -> str:
        self._expected += [self._tokenizer.id_to_token(i) for i in ids if i in self._hidden]
        if not self._expected and not self.pending:
            return text
        text, self.pending = self.pending + text, ""
        visible = []
        while self._expected:
            special = self._expected[0]
            before, separator, after = text.partition(special)
            if not separator:  # but the end of the text may be its beginning
                starts = range(max(0, len(text) - len(special) + 1), len(text))
                end = next((i for i in starts if special.startswith(text[i:])), len(text))
                text, self.pending = text[:end], text[end:]
                break
            visible.append(before)
            text = after
            del self._expected[0]
        return "".join(visible) + text

    def finish(self) -> str:
        pending, self.pending = self.pending, ""
        return pending
