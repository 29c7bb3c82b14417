"""Calls of Qwen3-Coder.

::

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The format of Qwen3-Coder, of its template (https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct).
The model sometimes leaves the first tag out.
"""

from __future__ import annotations

import re

from treadle_parsing_kit.element_family import ElementFamilyParser, ElementFormat

__all__ = ("Qwen3Coder",)


class Qwen3Coder(ElementFamilyParser):
    format = ElementFormat(
        begin="<function=",
        end="</function>",
        open="<parameter=",
        close="</parameter>",
        name=re.compile(r"([^>\s]+)>\s*"),
        parameter=re.compile(r"<parameter=([^>]+)>(.*?)</parameter>\s*", re.DOTALL),
        special_tags=("<tool_call>", "</tool_call>"),
        wrappers=("<tool_call>",),
        closers=("</tool_call>",),
        newlines=True,
        block=((), ("\n",), ()),
        head=("<tool_call>", "\n<function={name}>\n"),
        argument=("<parameter={name}>\n", "{value}", "\n</parameter>\n"),
        tail=("</function>\n", "</tool_call>"),
    )
