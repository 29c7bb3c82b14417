"""Calls of xLAM.

::

    [{"name": "get_weather", "arguments": {"city": "Paris"}}]

The format of xLAM 1 and 2 (https://huggingface.co/Salesforce/Llama-xLAM-2-8b-fc-r), which is a list of calls
and nothing else; a fence or another model's tags around it are read too. A list without tags is
one of calls only if a line begins with it and it names tools of the request.
"""

from __future__ import annotations

from treadle_parsing_kit.json_family import JsonFamilyParser, JsonFormat

__all__ = ("Xlam",)


class Xlam(JsonFamilyParser):
    special_tags = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")
    format = JsonFormat(
        words=("```json", *special_tags[:2]),
        end_words=("```", special_tags[2]),
        arrays=True,
        bare=True,
        head="[",
        tail="]",
    )
