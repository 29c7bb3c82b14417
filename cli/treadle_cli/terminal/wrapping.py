"""Word wrap for text that arrives in pieces, as the escape sequences that a terminal needs.

Text is shown at once. A word that grows beyond the edge is erased there and written again on the
next line, so that nobody waits for the end of a word.
"""

from __future__ import annotations

from collections.abc import Callable

from wcwidth import wcswidth, wcwidth

__all__ = ("Wrapper", "text_width")

TAB = 8
LEAST_WIDTH = 10
# In Chinese and Japanese a line may break anywhere, but not before these.
CLOSING = frozenset(
    "、。，．・：；？！ー）」』】〉》〕］｝’”…‥ぁぃぅぇぉっゃゅょァィゥェォッャュョ々"
)


class Wrapper:
    """Turns pieces of a text into what is written to a terminal of ``width()`` columns.

    The last column stays free: with a character in it, terminals disagree where the cursor is.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        """Columns of the line before the present word."""
        self._word = ""

    @property
    def is_at_start(self) -> bool:
        """Whether the cursor is at the start of a line."""
        return not self._column and not self._word

    def feed(self, text: str) -> str:
        """Return what shows ``text``, whose only control characters are newlines and tabs."""
        limit = max(LEAST_WIDTH, self._width() - 1)
        return "".join(self._character(c, limit) for c in text)

    def _character(self, character: str, limit: int) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return "\n"
        if character in " \t":
            return self._space(character, limit)
        shown = ""
        if self._word and wcwidth(character) == 2 and character not in CLOSING:
            self._end_word()
        width = text_width(self._word + character)
        if self._column + width <= limit:
            self._word += character
            return character
        if self._column:  # the word goes to the next line
            erased = text_width(self._word)
            shown = (f"\x1b[{erased}D\x1b[K" if erased else "") + "\n" + self._word
            self._column = 0
            width = text_width(self._word + character)
        if width > limit:  # a word longer than a line is cut
            shown += "\n"
            self._word = ""
        self._word += character
        return shown + character

    def _space(self, character: str, limit: int) -> str:
        self._end_word()
        count = TAB - self._column % TAB if character == "\t" else 1
        if self._column + count > limit:
            return ""  # the line breaks here, before the next word
        self._column += count
        return " " * count

    def _end_word(self) -> None:
        self._column += text_width(self._word)
        self._word = ""


def text_width(text: str) -> int:
    """Columns that a text without control characters takes."""
    width = wcswidth(text)
    return width if width >= 0 else sum(max(0, wcwidth(c)) for c in text)
