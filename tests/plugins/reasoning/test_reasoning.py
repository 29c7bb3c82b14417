"""The reasoning parsers, by the suite, and what the end of a prompt tells them."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.api.kinds import REASONING_PARSERS
from treadle.plugins import PluginManager
from treadle.testing.grammars import ByteTokenizer
from treadle.testing.parsers import ReasoningSuite, reasoning, text
from treadle.testing.plugin import PluginSuite

ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
OPENED = f"{ASKED}<think>\n"
CLOSED = f"{ASKED}<think>\n\n</think>\n\n"

# What both do.
COMMON = [
    (ASKED, "<think>\nhm, <b>\n</think>\n\nyes", [reasoning("hm, <b>"), text("yes")]),
    (ASKED, "\n<think>hm</think> yes\n", [reasoning("hm"), text("yes\n")]),
    (ASKED, "<think>\n\n</think>\n\nyes", [text("yes")]),
    (ASKED, "<think></think>", []),
    (ASKED, "<think>\none\n\ntwo\n", [reasoning("one\n\ntwo")]),
    (ASKED, "<think>a </thin", [reasoning("a </thin")]),
    (ASKED, "<think>a <think> b</think>c</think>", [reasoning("a  b"), text("c")]),
    (
        ASKED,
        "<think>call it</think>\n<tool_call>\n{}\n</tool_call>",
        [reasoning("call it"), text("<tool_call>\n{}\n</tool_call>")],
    ),
    (OPENED, "hm\n</think>\n\nyes", [reasoning("hm"), text("yes")]),
    (OPENED, "<think>\nhm</think>yes", [reasoning("hm"), text("yes")]),
    (OPENED, "</think>yes", [text("yes")]),
    (OPENED, "hm", [reasoning("hm")]),
    (OPENED, "", []),
    (f"{OPENED}I was thinking", " of you</think>yes", [reasoning(" of you"), text("yes")]),
    (CLOSED, "yes <think> no", [text("yes  no")]),
    (CLOSED, " yes", [text(" yes")]),
    (f"{CLOSED}The answer is", " yes", [text(" yes")]),
    (CLOSED, "<thi", [text("<thi")]),
]


class TestDeepSeekR1(PluginSuite, ReasoningSuite):
    plugin = "reasoning_parsers:deepseek_r1"
    cases = [
        *COMMON,
        (ASKED, "hm</think>yes", [reasoning("hm"), text("yes")]),
        (ASKED, "only thoughts ", [reasoning("only thoughts")]),
        ("", "hm\n</think>\nyes", [reasoning("hm"), text("yes")]),
    ]


class TestQwen3(PluginSuite, ReasoningSuite):
    plugin = "reasoning_parsers:qwen3"
    cases = [
        *COMMON,
        (ASKED, " yes, </think> is a tag", [text(" yes,  is a tag")]),
        (ASKED, "Write <think> first.", [text("Write  first.")]),
        (ASKED, "  \n", [text("  \n")]),
        ("", "yes", [text("yes")]),
    ]


@pytest.mark.parametrize(
    ("prompt", "in_reasoning"),
    [
        (OPENED, True),
        (f"{OPENED}I was thinking", True),
        (CLOSED, False),
        (f"{CLOSED}It is", False),
        (ASKED, None),
        ("", None),
        # A tag that somebody wrote in an earlier message opens and closes nothing.
        (f"<|im_start|>user\nWhat is <think>?<|im_end|>\n{ASKED}", None),
        (f"<|im_start|>user\nWhat is </think>?<|im_end|>\n{ASKED}", None),
        (f"<|im_start|>assistant\n<think>a</think>b<|im_end|>\n{ASKED}", None),
        (f"<|im_start|>assistant\n<think>a</think>b<|im_end|>\n{OPENED}", True),
    ],
)
@pytest.mark.parametrize("key", ["deepseek_r1", "qwen3"])
def test_the_prompt_says_where_the_answer_begins(
    key: str, prompt: str, in_reasoning: bool | None
) -> None:
    tokenizer: Any = ByteTokenizer("<|im_start|>", "<|im_end|>")
    parser = PluginManager().create(REASONING_PARSERS, key, tokenizer=tokenizer, prompt=prompt)
    assert parser.in_reasoning == (key == "deepseek_r1" if in_reasoning is None else in_reasoning)
