"""Calls of GLM 4.5.

::

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

The format of GLM 4.5 and 4.6, of its template (https://huggingface.co/zai-org/GLM-4.5); 4.7 leaves the
line breaks out.
"""

from __future__ import annotations

import re

from treadle_parsing_kit.element_family import ElementFamilyParser, ElementFormat

__all__ = ("Glm4Moe",)


class Glm4Moe(ElementFamilyParser):
    format = ElementFormat(
        begin="<tool_call>",
        end="</tool_call>",
        open="<arg_value>",
        close="</arg_value>",
        name=re.compile(r"\s*([^\s<]+)\s*"),
        parameter=re.compile(
            r"<arg_key>\s*([^<]*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
        ),
        special_tags=(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        block=((), ("\n",), ()),
        head=("<tool_call>", "{name}\n"),
        argument=(
            "<arg_key>",
            "{name}",
            "</arg_key>",
            "\n",
            "<arg_value>",
            "{value}",
            "</arg_value>",
            "\n",
        ),
        tail=("</tool_call>",),
    )
