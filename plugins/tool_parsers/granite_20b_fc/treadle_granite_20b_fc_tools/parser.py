"""Calls of Granite 20B function calling.

::

    <function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}

The format of granite-20b-functioncalling
(https://huggingface.co/ibm-granite/granite-20b-functioncalling).
"""

from __future__ import annotations

from treadle_parsing_kit.json_family import JsonFamilyParser, JsonFormat

__all__ = ("Granite20bFc",)


class Granite20bFc(JsonFamilyParser):
    format = JsonFormat(
        begin=("<function_call>",),
        head=" ",
        separator="\n",
    )
