"""Reasoning of gpt-oss, in OpenAI's Harmony format.

::

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

The format of gpt-oss (https://cookbook.openai.com/articles/openai-harmony). Messages of the channel
``analysis`` are reasoning, and those of ``final`` and ``commentary`` the answer. A message to a
function is left to the tool parser as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from treadle.api.parsers import Delta, ReasoningDelta, TextDelta
from treadle_parsing_kit.partial_match import TagFilter, find_tag

__all__ = ("Harmony",)

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
BODY_TAGS = (*ENDS, START, CHANNEL)
MAX_TAG_LEN = max(map(len, BODY_TAGS))
MAX_HEADER_LEN = 512
_blank = re.compile(r"\s*")
_channel = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony:
    special_tags = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
    closing_tag = f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}"
    """See ``treadle.api.parsers.SupportsReasoningCloser``."""

    def __init__(self, prompt: str) -> None:
        _, opened, tail = prompt.rpartition(MESSAGE)
        header = prompt[prompt.rfind(START) :] if opened else ""
        match = _channel.search(header)
        is_open = bool(opened) and not any(tag in tail for tag in (*ENDS, START)) and match
        channel = match[1] if is_open and match else ""
        self.in_reasoning = channel in ("", "analysis")
        self._body = bool(channel)
        self._is_fresh = not channel  # nothing was written yet, and no message is open
        self._is_call = self._has_message = False
        self._blanks: list[str] = []
        self._pending = ""
        self._filter = TagFilter(self.special_tags)

    @property
    def opening_tag(self) -> str | None:
        """See ``treadle.api.parsers.SupportsReasoningOpener``."""
        return f"{CHANNEL}analysis{MESSAGE}" if self._is_fresh else None

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self._is_fresh = self._is_fresh and not text
        if self._pending:
            text, self._pending = self._pending + text, ""
        deltas: list[Delta] = []
        pos = 0
        while pos < len(text):
            read = self._read_body if self._body else self._read_header
            pos = read(text, pos, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        text, self._pending = self._pending, ""
        deltas: list[Delta] = []
        if not self._has_message:
            text, self._blanks = "".join(self._blanks) + text, []
        if text:
            self._say(text, deltas)
        if rest := self._filter.finish():
            deltas.append(ReasoningDelta(rest) if self.in_reasoning else TextDelta(rest))
        return deltas

    def _read_header(self, text: str, pos: int, deltas: list[Delta]) -> int:
        """Read from the end of one message up to the text of the next."""
        blank = _blank.match(text, pos)
        begin = pos if blank is None else blank.end()
        tags = (START, CHANNEL)
        if begin == len(text):
            self._blanks.append(text[pos:])
            return begin
        if not text.startswith(tags, begin):
            if len(text) - begin < MAX_TAG_LEN and any(t.startswith(text[begin:]) for t in tags):
                self._pending = text[pos:]
                return len(text)
            self._body = True  # an answer without a header
            self.in_reasoning = False
            self._blanks.append(text[pos:begin])
            self._say("".join(self._blanks), deltas)
            self._blanks.clear()
            return begin
        end = text.find(MESSAGE, begin, begin + MAX_HEADER_LEN + len(MESSAGE))
        if end < 0:
            if len(text) - begin > MAX_HEADER_LEN:
                self._body, self.in_reasoning = True, False
                return pos
            self._pending = text[pos:]
            return len(text)
        header, end = text[begin:end], end + len(MESSAGE)
        self._body, self._blanks = True, []
        self._is_call = " to=" in header
        match = _channel.search(header)
        self.in_reasoning = not self._is_call and match is not None and match[1] == "analysis"
        if self._is_call:
            self._say(text[begin:end], deltas)
        return end

    def _read_body(self, text: str, pos: int, deltas: list[Delta]) -> int:
        self._has_message = True
        start, tag = find_tag(text, pos, BODY_TAGS)
        if not tag:
            self._pending = text[start:]
            self._say(text[pos:start], deltas)
            return len(text)
        is_end = tag in ENDS
        self._say(text[pos:start] + (tag if is_end and self._is_call else ""), deltas)
        self._body = self._is_call = False
        return start + len(tag) * is_end

    def _say(self, text: str, deltas: list[Delta]) -> None:
        if self._is_call:
            deltas.append(TextDelta(text))
        elif self.in_reasoning:
            if text := self._filter.feed(text):
                deltas.append(ReasoningDelta(text))
        elif text := self._filter.feed(text):
            deltas.append(TextDelta(text))
