"""Calls of DeepSeek V3.1.

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

The format of DeepSeek V3.1, of its template (https://huggingface.co/deepseek-ai/DeepSeek-V3.1#toolcall).
"""

from __future__ import annotations

import re

from treadle_parsing_kit.named_family import NamedFamilyParser, NamedFormat

__all__ = ("DeepSeekV31",)


class DeepSeekV31(NamedFamilyParser):
    format = NamedFormat(
        begin="<｜tool▁call▁begin｜>",
        header=re.compile(r"\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*"),
        special_tags=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        wrappers=("<｜tool▁calls▁begin｜>",),
        closers=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        block=(("<｜tool▁calls▁begin｜>",), (), ("<｜tool▁calls▁end｜>",)),
        head=("<｜tool▁call▁begin｜>", "{name}", "<｜tool▁sep｜>"),
        tail=("<｜tool▁call▁end｜>",),
    )
