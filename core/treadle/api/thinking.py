"""Reasoning between two tags, whoever wrote the first one: the model or the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.api.callparser import held
from treadle.api.parsers import Delta, ReasoningDelta, TextDelta

__all__ = ("Thinking", "opened")


def opened(prompt: str, tags: tuple[str, str], tokenizer: Any) -> tuple[bool | None, str]:
    """How ``prompt`` leaves the answer that it begins, and what it says behind its last tag.

    ``True`` inside of reasoning, ``False`` behind it, ``None`` if the answer has no tag yet. A tag
    that a special token follows stands in an earlier message, as a quotation for instance.
    """
    begin, end = prompt.rfind(tags[0]), prompt.rfind(tags[1])
    if begin == end:  # neither
        return None, ""
    tag, at = (tags[0], begin) if begin > end else (tags[1], end)
    tail = prompt[at + len(tag) :]
    if tail.strip() and _has_special(tail, tokenizer):
        return None, ""
    return begin > end, tail


def _has_special(text: str, tokenizer: Any) -> bool:
    marks = {tokenizer.token(i) for i in getattr(tokenizer, "special_ids", ())} - {""}
    lengths = sorted({len(mark) for mark in marks})
    firsts = {mark[0] for mark in marks}
    return any(
        text[at : at + n] in marks
        for at, char in enumerate(text)
        if char in firsts
        for n in lengths
    )


class Thinking:
    """A ``ReasoningParser``. ``prompt`` is what ``opened`` found.

    ``always`` says that the model reasons even if neither it nor the prompt opens the tag; without
    that, an answer that does not begin with the tag is text. Blanks next to the tags are dropped.
    """

    def __init__(
        self, tags: tuple[str, str], prompt: tuple[bool | None, str], *, always: bool
    ) -> None:
        inside, tail = prompt
        self.tags = tags
        self.open = always if inside is None else inside
        self._fresh = True  # nothing but blanks since the last tag
        self._blank: list[str] = []
        self._carry = ""
        self._state = "begin"
        self._answered = inside is False  # the prompt has closed the reasoning
        if inside and tail.strip():  # the prompt has begun to think, and the model goes on
            self._state, self._fresh = "inside", False

    @property
    def opener(self) -> str | None:
        """See ``treadle.api.parsers.Opens``."""
        return None if self._answered or self._state != "begin" else self.tags[0]

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        text, self._carry = self._carry + text, ""
        out: list[Delta] = []
        while text:
            if self._state == "begin":
                text = self._begin(text)
            elif self._state == "inside":
                text = self._inside(text, out)
            elif self._state == "behind":
                text = text.lstrip()
                self._state = "text" if text else "behind"
            else:
                out.append(TextDelta("".join(self._blank) + text))
                self._blank.clear()
                text = ""
        return out

    def finish(self) -> list[Delta]:
        text, self._carry = self._carry, ""
        if self.open:
            return self._think(text) if text else []
        text = "".join(self._blank) + text
        self._blank.clear()
        return [TextDelta(text)] if text else []

    def _begin(self, text: str) -> str:
        """Look for the first tag behind any blanks."""
        plain = text.lstrip()
        self._blank.append(text[: len(text) - len(plain)])
        if plain.startswith(self.tags[0]):
            self._blank.clear()
            self.open, self._state = True, "inside"
            return plain[len(self.tags[0]) :]
        if self.tags[0].startswith(plain):  # or nothing is left
            self._carry = plain
            return ""
        self._state = "inside" if self.open else "text"
        if self.open:
            self._blank.clear()
        return plain

    def _inside(self, text: str, out: list[Delta]) -> str:
        before, end, behind = text.partition(self.tags[1])
        if end:
            out += self._think(before)
            self._blank.clear()
            self.open, self._state = False, "behind"
            return behind
        keep = held(text, (self.tags[1],))
        out += self._think(text[: len(text) - keep])
        self._carry = text[len(text) - keep :]
        return ""

    def _think(self, text: str) -> list[Delta]:
        """Reasoning without the blanks around it: those at its end wait for more."""
        body = text.rstrip()
        if not body:
            self._blank.append(text)
            return []
        before = "".join(self._blank)
        self._blank.clear()
        self._blank.append(text[len(body) :])
        said = (before + body).lstrip() if self._fresh else before + body
        self._fresh = False
        return [ReasoningDelta(said)]
