"""Calls of DeepSeek V3.

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

The format of DeepSeek V3 and R1, of its template (https://huggingface.co/deepseek-ai/DeepSeek-V3-0324).
"""

from __future__ import annotations

import re

from treadle_parsing_kit.named_family import NamedFamilyParser, NamedFormat

__all__ = ("DeepSeekV3",)


class DeepSeekV3(NamedFamilyParser):
    format = NamedFormat(
        begin="<｜tool▁call▁begin｜>",
        header=re.compile(r"\s*function<｜tool▁sep｜>\s*(?P<name>\S+)\s*```json\s*"),
        special_tags=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        wrappers=("<｜tool▁calls▁begin｜>",),
        closers=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        block=(("<｜tool▁calls▁begin｜>",), ("\n",), ("<｜tool▁calls▁end｜>",)),
        head=("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "{name}\n```json\n"),
        tail=("\n```", "<｜tool▁call▁end｜>"),
    )
