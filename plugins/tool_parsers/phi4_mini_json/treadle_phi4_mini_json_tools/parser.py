"""Calls of Phi-4 mini.

::

    functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>

The first is what Phi-4 mini writes in most prompts, the second what its template shows
(https://huggingface.co/microsoft/Phi-4-mini-instruct#tool-enabled-function-calling-format).
"""

from __future__ import annotations

from treadle_parsing_kit.json_family import JsonFamilyParser, JsonFormat

__all__ = ("Phi4Mini",)


class Phi4Mini(JsonFamilyParser):
    format = JsonFormat(
        begin=("<|tool_call|>",),
        end=("<|/tool_call|>",),
        words=("functools",),
        arrays=True,
        head="[",
        tail="]",
    )
