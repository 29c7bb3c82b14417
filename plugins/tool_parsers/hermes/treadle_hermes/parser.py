"""Hermes calls.

::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The format of the Hermes models (https://github.com/NousResearch/Hermes-Function-Calling), which
Qwen 2.5 and 3 and many others were taught as well. Written loosely it is read all the same: several
objects in one block, and a block that the end of the output or the next one closes.
"""

from __future__ import annotations

from treadle_parsing_kit.json_family import JsonFamilyParser, JsonFormat

__all__ = ("Hermes",)


class Hermes(JsonFamilyParser):
    format = JsonFormat(
        begin=("<tool_call>",), end=("</tool_call>",), head="\n", separator="\n", tail="\n"
    )
