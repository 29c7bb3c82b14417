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
from treadle_parsing_kit.partial_match import TagFilter, partial_match_len

__all__ = ("Harmony",)

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MAX_HEADER_LEN = 512
_channel = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony:
    special_tags = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
    closing_tag = f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}"

    def __init__(self, prompt: str) -> None:
        _, opened, tail = prompt.rpartition(MESSAGE)
        header = prompt[prompt.rfind(START) :] if opened else ""
        match = _channel.search(header)
        is_open = bool(opened) and not any(tag in tail for tag in (*ENDS, START)) and match
        channel = match[1] if is_open and match else ""
        self.in_reasoning = channel in ("", "analysis")
        self._body = bool(channel)
        self._is_call = self._has_message = False
        self._blanks: list[str] = []
        self._pending = ""
        self._filter = TagFilter(self.special_tags)

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        text, self._pending = self._pending + text, ""
        deltas: list[Delta] = []
        while text:
            text = self._read_body(text, deltas) if self._body else self._read_header(text, deltas)
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

    def _read_header(self, text: str, deltas: list[Delta]) -> str:
        """Read from the end of one message up to the text of the next."""
        stripped = text.lstrip()
        tags = (START, CHANNEL)
        if not stripped:
            self._blanks.append(text)
            return ""
        if not stripped.startswith(tags):
            if any(tag.startswith(stripped) for tag in tags):
                self._pending = text
                return ""
            self._body = True  # an answer without a header
            self.in_reasoning = False
            text, self._blanks = "".join(self._blanks) + text, []
            return text
        header, tag, rest = stripped.partition(MESSAGE)
        if not tag:
            if len(header) > MAX_HEADER_LEN:
                self._body, self.in_reasoning = True, False
                return text
            self._pending = text
            return ""
        self._body, self._blanks = True, []
        self._is_call = " to=" in header
        match = _channel.search(header)
        self.in_reasoning = not self._is_call and match is not None and match[1] == "analysis"
        if self._is_call:
            self._say(header + tag, deltas)
        return rest

    def _read_body(self, text: str, deltas: list[Delta]) -> str:
        self._has_message = True
        tags = (*ENDS, START, CHANNEL)
        found = min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)
        if found is None:
            num_pending = partial_match_len(text, tags)
            self._pending = text[len(text) - num_pending :]
            self._say(text[: len(text) - num_pending], deltas)
            return ""
        at, tag = found
        is_end = tag in ENDS
        self._say(text[:at] + (tag if is_end and self._is_call else ""), deltas)
        self._body = self._is_call = False
        return text[at + len(tag) * is_end :]

    def _say(self, text: str, deltas: list[Delta]) -> None:
        if self._is_call:
            deltas.append(TextDelta(text))
        elif self.in_reasoning:
            if text := self._filter.feed(text):
                deltas.append(ReasoningDelta(text))
        elif text := self._filter.feed(text):
            deltas.append(TextDelta(text))
