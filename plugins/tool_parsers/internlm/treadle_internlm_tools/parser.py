"""Calls of InternLM 2.5.

::

    <|action_start|><|plugin|>
    {"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>

The format of InternLM 2 and 2.5
(https://github.com/InternLM/InternLM/blob/main/chat/chat_format.md).
"""

from __future__ import annotations

from treadle_parsing_kit.json_family import JsonFamilyParser, JsonFormat

__all__ = ("Internlm",)


class Internlm(JsonFamilyParser):
    special_tags = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    format = JsonFormat(
        begin=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        end=("<|action_end|>",),
        arguments="parameters",
        head="\n",
        separator="\n",
    )
