"""Reasoning between two tags, whether the model or the prompt wrote the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.api.parsers import Delta, ReasoningDelta, TextDelta
from treadle_parsing_kit.partial_match import TagFilter, partial_match_len

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
)
"""What begins a tool call in some format: in the middle of a thought, it ends the thought."""


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
        return None if self._answered or self._state != "begin" else self._opening_tag

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        text, self._pending = self._pending + text, ""
        deltas: list[Delta] = []
        while text:
            if self._state == "begin":
                text = self._begin(text)
            elif self._state == "inside":
                text = self._inside(text, deltas)
            elif self._state == "after":
                text = self._after(text)
            elif self._state == "label":
                text = self._read_label(text)
            else:
                self._answer(text, deltas)
                text = ""
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

    def _begin(self, text: str) -> str:
        """Look for the first tag after any whitespace."""
        stripped = text.lstrip()
        self._whitespace.append(text[: len(text) - len(stripped)])
        if any(len(tag) > len(stripped) and tag.startswith(stripped) for tag in self._begins):
            self._pending = stripped  # or nothing is left
            return ""
        found = max((tag for tag in self._begins if stripped.startswith(tag)), key=len, default="")
        if found:
            self._whitespace.clear()
            self.in_reasoning, self._state = True, "label" if self._label else "inside"
            return stripped[len(found) :]
        self._state = "inside" if self.in_reasoning else "text"
        if self.in_reasoning:
            self._whitespace.clear()
        return stripped

    def _read_label(self, text: str) -> str:
        if len(text) < len(self._label) and self._label.startswith(text):
            self._pending = text
            return ""
        self._state = "inside"
        return text.removeprefix(self._label)

    def _after(self, text: str) -> str:
        """Drop whitespace and tags between a thought and the answer."""
        text = text.lstrip()
        for tag in self._hidden:
            if text.startswith(tag):
                return text[len(tag) :]
        if any(tag.startswith(text) for tag in self._hidden):  # or nothing is left
            self._pending = text
            return ""
        self._state = "text" if text else "after"
        return text

    def _inside(self, text: str, deltas: list[Delta]) -> str:
        tags = (*self._ends, *self._begins, *CALL_OPENERS)
        found = [(start, -len(tag), tag) for tag in tags if (start := text.find(tag)) >= 0]
        if not found:
            num_pending = partial_match_len(text, tags)
            deltas += self._think(text[: len(text) - num_pending])
            self._pending = text[len(text) - num_pending :]
            return ""
        start, _, tag = min(found)
        deltas += self._think(text[:start])
        if tag in self._begins:
            return text[start + len(tag) :]
        self._whitespace.clear()
        self.in_reasoning, self._state = False, "after"
        return text[start + len(tag) * (tag in self._ends) :]

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
