"""Reasoning between two tags, whether the model or the prompt wrote the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.api.parsers import Delta, ReasoningDelta, TextDelta
from treadle_parsing_kit.partial_match import partial_match_len

__all__ = ("TaggedReasoningParser", "prompt_reasoning_state")


def prompt_reasoning_state(
    prompt: str, tags: tuple[str, str], tokenizer: Any
) -> tuple[bool | None, str]:
    """Return the reasoning state at the end of the prompt, and the text after its last tag.

    State: ``True`` inside reasoning, ``False`` after it, ``None`` if the assistant turn has no tag
    yet. A tag that a special token follows belongs to an earlier message and does not count.
    """
    begin, end = prompt.rfind(tags[0]), prompt.rfind(tags[1])
    if begin == end:  # neither
        return None, ""
    tag, pos = (tags[0], begin) if begin > end else (tags[1], end)
    tail = prompt[pos + len(tag) :]
    if tail.strip() and _has_special(tail, tokenizer):
        return None, ""
    return begin > end, tail


def _has_special(text: str, tokenizer: Any) -> bool:
    specials = {tokenizer.id_to_token(i) for i in getattr(tokenizer, "special_token_ids", ())} - {
        ""
    }
    lengths = sorted({len(special) for special in specials})
    firsts = {special[0] for special in specials}
    return any(
        text[pos : pos + n] in specials
        for pos, char in enumerate(text)
        if char in firsts
        for n in lengths
    )


class TaggedReasoningParser:
    """A ``ReasoningParser``. ``prompt`` is the result of ``prompt_reasoning_state``.

    ``always``: the model reasons even if neither it nor the prompt writes the first tag. Without
    it, an answer that does not begin with the tag is text. Whitespace next to tags is dropped.
    """

    def __init__(
        self, special_tags: tuple[str, str], prompt: tuple[bool | None, str], *, always: bool
    ) -> None:
        in_reasoning, tail = prompt
        self.special_tags = special_tags
        self.in_reasoning = always if in_reasoning is None else in_reasoning
        self._fresh = True  # only whitespace since the last tag
        self._whitespace: list[str] = []
        self._pending = ""
        self._state = "begin"
        self._answered = in_reasoning is False  # the prompt has ended the reasoning
        if in_reasoning and tail.strip():  # the prompt has begun the reasoning
            self._state, self._fresh = "inside", False

    @property
    def opening_tag(self) -> str | None:
        """See ``treadle.api.parsers.Opens``."""
        return None if self._answered or self._state != "begin" else self.special_tags[0]

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        text, self._pending = self._pending + text, ""
        deltas: list[Delta] = []
        while text:
            if self._state == "begin":
                text = self._begin(text)
            elif self._state == "inside":
                text = self._inside(text, deltas)
            elif self._state == "after":
                text = text.lstrip()
                self._state = "text" if text else "after"
            else:
                deltas.append(TextDelta("".join(self._whitespace) + text))
                self._whitespace.clear()
                text = ""
        return deltas

    def finish(self) -> list[Delta]:
        text, self._pending = self._pending, ""
        if self.in_reasoning:
            return self._think(text) if text else []
        text = "".join(self._whitespace) + text
        self._whitespace.clear()
        return [TextDelta(text)] if text else []

    def _begin(self, text: str) -> str:
        """Look for the first tag after any whitespace."""
        stripped = text.lstrip()
        self._whitespace.append(text[: len(text) - len(stripped)])
        if stripped.startswith(self.special_tags[0]):
            self._whitespace.clear()
            self.in_reasoning, self._state = True, "inside"
            return stripped[len(self.special_tags[0]) :]
        if self.special_tags[0].startswith(stripped):  # or nothing is left
            self._pending = stripped
            return ""
        self._state = "inside" if self.in_reasoning else "text"
        if self.in_reasoning:
            self._whitespace.clear()
        return stripped

    def _inside(self, text: str, deltas: list[Delta]) -> str:
        before, end, rest = text.partition(self.special_tags[1])
        if end:
            deltas += self._think(before)
            self._whitespace.clear()
            self.in_reasoning, self._state = False, "after"
            return rest
        num_pending = partial_match_len(text, (self.special_tags[1],))
        deltas += self._think(text[: len(text) - num_pending])
        self._pending = text[len(text) - num_pending :]
        return ""

    def _think(self, text: str) -> list[Delta]:
        """Return reasoning without the whitespace around it; that at its end waits for more."""
        body = text.rstrip()
        if not body:
            self._whitespace.append(text)
            return []
        before = "".join(self._whitespace)
        self._whitespace.clear()
        self._whitespace.append(text[len(body) :])
        reasoning = (before + body).lstrip() if self._fresh else before + body
        self._fresh = False
        return [ReasoningDelta(reasoning)]
