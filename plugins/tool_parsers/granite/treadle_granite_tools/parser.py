"""Calls of Granite 3.

::

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]

The format of Granite 3.0 to 3.3 (https://huggingface.co/ibm-granite/granite-3.3-8b-instruct); 3.1 wrote
``<tool_call>``. Granite 4 writes that of Hermes.
"""

from __future__ import annotations

from treadle_parsing_kit.json_family import JsonFamilyParser, JsonFormat

__all__ = ("Granite",)


class Granite(JsonFamilyParser):
    format = JsonFormat(
        begin=("<|tool_call|>", "<tool_call>"),
        arrays=True,
        head="[",
        tail="]",
    )
