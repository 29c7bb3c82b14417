"""Calls of Jamba.

::

    <tool_calls>[
        {"name": "get_weather", "arguments": {"city": "Paris"}}
    ]</tool_calls>

The format of Jamba 1.5 and later
(https://huggingface.co/ai21labs/AI21-Jamba-Mini-1.5#tool-use-with-jamba).
"""

from __future__ import annotations

from treadle_parsing_kit.json_family import JsonFamilyParser, JsonFormat

__all__ = ("Jamba",)


class Jamba(JsonFamilyParser):
    format = JsonFormat(
        begin=("<tool_calls>",),
        end=("</tool_calls>",),
        arrays=True,
        head="[\n    ",
        separator=",\n    ",
        tail="\n]",
    )
