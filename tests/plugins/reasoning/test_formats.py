"""The reasoning parsers of the other families: the suite, and outputs in the exact format of each."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from treadle.api.kinds import REASONING_PARSERS
from treadle.plugins import PluginManager
from treadle.testing.parsers import ReasoningSuite, merge_adjacent, reasoning, text
from treadle.testing.plugin import PluginSuite
from treadle.testing.streams import CodePointTokenizer
from treadle_parsing_kit.reasoning_tags import CALL_OPENERS

THOUGHTS = [
    "hm",
    "Let me see.\n\n1. a < b\n2. </b> & more",
    "The user wrote {} and [1].",
    "世界 é 👩‍👩‍👧",
    "Here is a <tag> and\n- a list\n- of two",
]
ANSWERS = ["yes", "Two\n\nparagraphs. ", "```py\nx = [1]\n```", "<b>é</b> Here is", "{}"]
# What the model writes before a thought, between it and the answer, and behind the answer.
FORMATS: dict[str, list[tuple[str, str, str, str]]] = {
    "granite": [
        ("", "Here is my thought process: ", "\nHere is my response: ", ""),
        ("", "Here's my thought process:\n", "\n\nHere's my response:\n", ""),
    ],
    "mistral": [("", "[THINK]", "[/THINK]", ""), ("[THINK]", "", "[/THINK]\n", "")],
    "kimi": [("", "<think>", "</think>", ""), ("", "◁think▷", "◁/think▷", "")],
    "glm": [("", "\n<think>", "</think>\n", ""), ("<think>", "", "</think>", "")],
    "deepseek_v3": [("<think>", "", "</think>", ""), ("", "<think>", "</think>", "")],
    "hunyuan": [
        ("", "<think>\n", "\n</think>\n<answer>\n", "\n</answer>"),
        ("", "<think>\n", "\n</think>\n", ""),
    ],
    "step3": [("<think>\n", "", "\n</think>\n", ""), ("", "", "</think>", "")],
    "gemma4": [
        ("", "<|channel>thought\n", "<channel|>", ""),
        ("", "<|channel>", "<channel|>\n", ""),
    ],
    "harmony": [
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            "<|return|>",
        ),
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            "",
            "<|end|><|start|>assistant<|channel|>commentary<|message|>",
            "<|end|>",
        ),
    ],
}
ALIASES = {"magistral", "kimi_k2", "glm45", "hunyuan_a13b", "openai_gptoss"}
PLUGINS = PluginManager()
TOKENIZER: Any = CodePointTokenizer()


@pytest.mark.parametrize("key", FORMATS)
def test_thoughts_as_the_model_writes_them(key: str) -> None:
    count = 0
    for prompt, before, between, behind in FORMATS[key]:
        for thought in THOUGHTS:
            for answer in ANSWERS:
                output = f"{before}{thought}{between}{answer}{behind}"
                for size in (len(output), 4, 1):
                    parser = PLUGINS.create(
                        REASONING_PARSERS, key, tokenizer=TOKENIZER, prompt=prompt
                    )
                    pieces = [output[i : i + size] for i in range(0, len(output), size)]
                    deltas = [delta for piece in pieces for delta in parser.feed(piece, ())]
                    found = merge_adjacent([*deltas, *parser.finish()])
                    assert found == [reasoning(thought), text(answer)], output
                    assert not parser.in_reasoning
                count += 1
    assert count >= 40


@pytest.mark.parametrize("key", sorted(ALIASES))
def test_other_names_are_the_same_parsers(key: str) -> None:
    parser = PLUGINS.create(REASONING_PARSERS, key, tokenizer=TOKENIZER, prompt="")
    assert parser.feed("plain ", ()) + parser.finish()


@pytest.mark.parametrize("key", sorted({*FORMATS, "deepseek_r1", "qwen3"} - {"harmony"}))
def test_a_call_of_any_format_ends_an_open_thought(key: str) -> None:
    """Formats of calls and of thoughts are chosen apart."""
    prompt, before, *_ = FORMATS.get(key, [("", "<think>", "", "")])[0]
    for opener in CALL_OPENERS:
        for size in (1, 4, 400):
            parser = PLUGINS.create(REASONING_PARSERS, key, tokenizer=TOKENIZER, prompt=prompt)
            output = f"{before}hm {opener}rest"
            pieces = [output[i : i + size] for i in range(0, len(output), size)]
            deltas = [delta for piece in pieces for delta in parser.feed(piece, ())]
            found = merge_adjacent([*deltas, *parser.finish()])
            assert found == [reasoning("hm"), text(f"{opener}rest")], output


class Thoughts(PluginSuite, ReasoningSuite):
    prose: ClassVar = ("  blanks around\n\n", "a < b, </", "Here", "[", " ")
    lengths = (400, 1600)


class TestGranite(Thoughts):
    plugin = "reasoning_parsers:granite"
    tags = ("Here is my thought process:", "Here is my response:")
    cases = [
        ("", f"{tags[0]} hm {tags[1]} yes", [reasoning("hm"), text("yes")]),
        ("", "Here is my take.", [text("Here is my take.")]),
    ]

    def samples(self) -> Any:
        """What announces an answer is a sentence, which may stand in an answer again."""
        return ((o, open_) for o, open_ in super().samples() if o.count(self.tags[1]) < 2)

    def bare(self, output: str) -> str:
        return super().bare(output) if self.tags[0] in output else "".join(output.split())

    def test_no_tag_is_left(self) -> None:
        for output, open_, _ in self.expected():
            for delta in self.parse(open_, [output]):
                assert "Here is my thought" not in getattr(delta, "text", "")


class TestMistral(Thoughts):
    plugin = "reasoning_parsers:mistral"
    tags = ("[THINK]", "[/THINK]")
    call_openers = ("[TOOL_CALLS]",)
    cases = [("", "[THINK]hm[/THINK]yes", [reasoning("hm"), text("yes")])]


class TestKimi(Thoughts):
    plugin = "reasoning_parsers:kimi"
    call_openers = ("<|tool_calls_section_begin|>",)
    cases = [("", "◁think▷hm◁/think▷yes</think>", [reasoning("hm"), text("yes")])]

    def bare(self, output: str) -> str:
        return super().bare(output.replace("◁think▷", "").replace("◁/think▷", ""))


class TestGlm(Thoughts):
    plugin = "reasoning_parsers:glm"
    cases = [("<think></think>\n", "yes", [text("yes")])]


class TestDeepSeekV3(Thoughts):
    plugin = "reasoning_parsers:deepseek_v3"
    call_openers = ("<｜tool▁calls▁begin｜>",)
    cases = [
        ("<｜Assistant｜></think>", "yes", [text("yes")]),
        ("<｜Assistant｜><think>", "hm</think>yes", [reasoning("hm"), text("yes")]),
    ]


class TestHunyuan(Thoughts):
    plugin = "reasoning_parsers:hunyuan"
    cases = [("", "<think>\n\n</think>\n", []), ("", "<think>hm", [reasoning("hm")])]


class TestStep3(Thoughts):
    plugin = "reasoning_parsers:step3"
    cases = [("", "hm</think>yes</think>", [reasoning("hm"), text("yes")])]


class TestGemma4(Thoughts):
    plugin = "reasoning_parsers:gemma4"
    tags = ("<|channel>", "<channel|>")
    call_openers = ("<|tool_call>",)
    cases = [("", "<|channel>thoughts<channel|>yes", [reasoning("thoughts"), text("yes")])]


class TestHarmony(Thoughts):
    plugin = "reasoning_parsers:harmony"
    tags = ("<|channel|>analysis<|message|>", "<|end|>")
    call_openers = ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>",)
    cases = [
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            " to=functions.f<|message|>{}<|call|>",
            [
                reasoning("hm"),
                text("<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
            ],
        ),
        ("", "Hello there.", [text("Hello there.")]),
    ]

    def test_no_tag_is_left(self) -> None:
        """But those of a call, which the tool parser reads."""
        for output, open_ in self.samples():
            if "to=functions" not in output:
                for delta in self.parse(open_, [output]):
                    assert "<|" not in getattr(delta, "text", ""), f"left of {output!r}"

    def bare(self, output: str) -> str:
        for part in (*self.tags, "<|start|>", "assistant", "<|channel|>"):
            output = output.replace(part, "")
        return super().bare(output)
