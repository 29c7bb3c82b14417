"""Calls of MiniMax M2.

::

    <minimax:tool_call>
    <invoke name="get_weather">
    <parameter name="city">Paris</parameter>
    </invoke>
    </minimax:tool_call>

The format of MiniMax M2
(https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md).
"""

from __future__ import annotations

import re

from treadle_parsing_kit.element_family import ElementFamilyParser, ElementFormat

__all__ = ("MiniMaxM2",)


class MiniMaxM2(ElementFamilyParser):
    format = ElementFormat(
        begin='<invoke name="',
        end="</invoke>",
        open='<parameter name="',
        close="</parameter>",
        name=re.compile(r'([^">\s]+)">\s*'),
        parameter=re.compile(r'<parameter name="([^">]+)">(.*?)</parameter>\s*', re.DOTALL),
        special_tags=("<minimax:tool_call>", "</minimax:tool_call>"),
        wrappers=("<minimax:tool_call>",),
        closers=("</minimax:tool_call>",),
        block=(("<minimax:tool_call>", "\n"), ("\n",), ("\n", "</minimax:tool_call>")),
        head=('<invoke name="{name}">\n',),
        argument=('<parameter name="{name}">', "{value}", "</parameter>\n"),
        tail=("</invoke>",),
    )
