"""Reasoning between two tags, whether the model or the prompt wrote the first one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from treadle.api.parsers import Delta, ReasoningDelta, TextDelta
from treadle_parsing_kit.partial_match import TagFilter, find_tag

__all__ = ("CALL_OPENERS", "TaggedReasoningParser", "prompt_reasoning_state")

CALL_OPENERS = (
    "<tool_call>",
    "<tool_calls>",
    "<|tool_call|>",
    "<|tool_call>",
    "<function_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|python_start|>",
    "<|action_start|>",
    "<｜tool▁calls▁begin｜>",
    "<|tool_calls_section_begin|>",
    "<minimax:tool_call>",
    "<function=",
    "<invoke name=",
    "<｜tool▁call▁begin｜>",
    "<|tool_call_begin|>",
    "functools[{",
)
"""What begins a tool call in some format: in the middle of a thought, it ends the thought.

Only what nobody writes for another reason. A bare list of JSON or of Python is what a model drafts in a
thought before it calls, and ends none.
"""


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


_blank = re.compile(r"\s*")


class TaggedReasoningParser:
    """A ``ReasoningParser``. ``prompt`` is the result of ``prompt_reasoning_state``.

    ``always``: the model reasons even if neither it nor the prompt writes the first tag. Without
    it, an answer that does not begin with the tag is text. Whitespace next to tags is dropped.
    ``aliases`` are other spellings of the two tags. ``hidden`` are the tags that are dropped wherever
    they stand, by default the two: one that closes what nobody opened, for instance. ``label`` is what
    the model writes behind the first tag before it thinks.
    """

    def __init__(
        self,
        special_tags: tuple[str, str],
        prompt: tuple[bool | None, str],
        *,
        always: bool,
        aliases: tuple[Sequence[str], Sequence[str]] = ((), ()),
        hidden: Sequence[str] | None = None,
        label: str = "",
    ) -> None:
        in_reasoning, tail = prompt
        begin, end = special_tags
        self._opening_tag, self.closing_tag = begin, end
        self._begins, self._ends = (begin, *aliases[0]), (end, *aliases[1])
        self._inner_tags = (*self._ends, *self._begins, *CALL_OPENERS)
        hidden = special_tags if hidden is None else hidden
        self.special_tags: tuple[str, ...] = tuple(dict.fromkeys((begin, end, *hidden)))
        self.in_reasoning = always if in_reasoning is None else in_reasoning
        self._fresh = True  # only whitespace since the last tag
        self._whitespace: list[str] = []
        self._pending = ""
        self._hidden, self._label = tuple(hidden), label
        self._filter = TagFilter(hidden)
        self._state = "begin"
        self._answered = in_reasoning is False  # the prompt has ended the reasoning
        if in_reasoning and tail.strip():  # the prompt has begun the reasoning
            self._state, self._fresh = "inside", False

    @property
    def opening_tag(self) -> str | None:
        """See ``treadle.api.parsers.Opens``."""
        is_over = self._answered or self.in_reasoning or self._state != "begin"
        return None if is_over else self._opening_tag

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        if self._pending:
            text, self._pending = self._pending + text, ""
        deltas: list[Delta] = []
        pos = 0
        while pos < len(text):
            if self._state == "inside":
                pos = self._inside(text, pos, deltas)
            elif self._state == "text":
                self._answer(text[pos:], deltas)
                break
            elif self._state == "begin":
                pos = self._begin(text, pos)
            elif self._state == "after":
                pos = self._after(text, pos)
            else:
                pos = self._read_label(text, pos)
        return deltas

    def finish(self) -> list[Delta]:
        text, self._pending = self._pending, ""
        if self.in_reasoning:
            return self._think(text) if text else []
        deltas: list[Delta] = []
        self._answer(text, deltas)
        text = self._filter.finish()
        return [*deltas, TextDelta(text)] if text else deltas

    def _answer(self, text: str, deltas: list[Delta]) -> None:
        text = self._filter.feed("".join(self._whitespace) + text)
        self._whitespace.clear()
        if text:
            deltas.append(TextDelta(text))

    def _begin(self, text: str, pos: int) -> int:
        """Look for the first tag after any whitespace."""
        start = _blank_end(text, pos)
        self._whitespace.append(text[pos:start])
        if self._may_begin(text, start, self._begins):
            return len(text)
        found = max(
            (tag for tag in self._begins if text.startswith(tag, start)), key=len, default=""
        )
        if found:
            self._whitespace.clear()
            self.in_reasoning, self._state = True, "label" if self._label else "inside"
            return start + len(found)
        self._state = "inside" if self.in_reasoning else "text"
        if self.in_reasoning:
            self._whitespace.clear()
        return start

    def _read_label(self, text: str, pos: int) -> int:
        if self._may_begin(text, pos, (self._label,)):
            return len(text)
        self._state = "inside"
        return pos + len(self._label) * text.startswith(self._label, pos)

    def _after(self, text: str, pos: int) -> int:
        """Drop whitespace and tags between a thought and the answer."""
        start = _blank_end(text, pos)
        for tag in self._hidden:
            if text.startswith(tag, start):
                return start + len(tag)
        if self._may_begin(text, start, self._hidden):
            return len(text)
        self._state = "text"
        return start

    def _may_begin(self, text: str, pos: int, tags: Sequence[str]) -> bool:
        """Return whether the rest of the text may be the beginning of a tag, and keep it then."""
        size = len(text) - pos
        is_open = any(len(tag) > size and tag.startswith(text[pos:]) for tag in tags)
        self._pending = text[pos:] if is_open else ""
        return is_open

    def _inside(self, text: str, pos: int, deltas: list[Delta]) -> int:
        start, tag = find_tag(text, pos, self._inner_tags)
        deltas += self._think(text[pos:start])
        if not tag:
            self._pending = text[start:]
            return len(text)
        if tag not in self._begins:
            self._whitespace.clear()
            self.in_reasoning, self._state = False, "after"
        return start if tag in CALL_OPENERS else start + len(tag)

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


def _blank_end(text: str, pos: int) -> int:
    match = _blank.match(text, pos)
    return pos if match is None else match.end()
