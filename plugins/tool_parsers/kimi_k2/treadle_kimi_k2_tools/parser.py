"""Calls of Kimi K2.

::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>

The format of Kimi K2 (https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from treadle.api.types import Tokenizer, Tool
from treadle_parsing_kit.named_family import NamedFamilyParser, NamedFormat

__all__ = ("KimiK2",)


class KimiK2(NamedFamilyParser):
    format = NamedFormat(
        begin="<|tool_call_begin|>",
        header=re.compile(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"
        ),
        special_tags=(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        wrappers=("<|tool_calls_section_begin|>",),
        closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        block=(("<|tool_calls_section_begin|>",), (), ("<|tool_calls_section_end|>",)),
        head=(
            "<|tool_call_begin|>",
            "functions.{name}:",
            "{index}",
            "<|tool_call_argument_begin|>",
        ),
        tail=("<|tool_call_end|>",),
    )

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        super().__init__(tokenizer, tools)
        self._ids: list[str] = []
        self._num_asked = 0

    def take_header(self, match: re.Match[str]) -> None:
        del self._ids[self.calls :]  # of a call that was none
        self._ids.append(match["id"])

    def call_id(self) -> str:
        """The model counts its calls over the whole conversation, and its template expects its own
        ids back."""
        self._num_asked += 1
        return self._ids[self._num_asked - 1]
