"""The parsers that the kit builds from tables, by the suite."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from treadle.api.kinds import TOOL_PARSERS
from treadle.plugins import PluginManager
from treadle.testing.parsers import ToolParserSuite, call, merge_adjacent, text
from treadle.testing.plugin import PluginSuite
from treadle.testing.streams import CodePointTokenizer
from treadle.testing.tool_calls import MALFORMED, SOUND

X = '{"x": "a}]`, {b}", "y": [1]}'
OBJECT = f'{{"name": "f", "arguments": {X}}}'


class Family(PluginSuite, ToolParserSuite):
    """Short texts: what is common to the parsers, the suites of the older ones try in all detail."""

    prose: ClassVar = ("  blanks around\n\n", "A list: [1, [see](below), {} a < b, </", "<", "[")
    lengths = (400, 1600)


class TestGranite(Family):
    plugin = "tool_parsers:granite"
    malformed = MALFORMED
    block = ("<|tool_call|>[", ", ", "]")
    sound = SOUND
    cases = [
        (f"Hm.<|tool_call|>[{OBJECT}]", [text("Hm."), call(0, "f", X)]),
        (f"<tool_call>[{OBJECT}, {OBJECT}] ok", [call(0, "f", X), call(1, "f", X), text(" ok")]),
        ("<|tool_call|>[]", [text("[]")]),
        ("<|tool_call|>", []),
    ]


class TestGranite20bFc(Family):
    plugin = "tool_parsers:granite-20b-fc"
    malformed = MALFORMED
    block = ("<function_call> ", "\n<function_call> ", "")
    sound = SOUND
    cases = [
        (f"<function_call> {OBJECT}\n<function_call> {OBJECT}", [call(0, "f", X), call(1, "f", X)]),
        (f"Hm. <function_call>{OBJECT} ok", [text("Hm. "), call(0, "f", X), text(" ok")]),
    ]


class TestInternlm(Family):
    plugin = "tool_parsers:internlm"
    malformed = MALFORMED
    block = ("<|action_start|><|plugin|>", "\n", "<|action_end|>")
    sound = SOUND
    cases = [
        (
            '<|action_start|><|plugin|>\n{"name": "g", "parameters": {}}<|action_end|>\n',
            [call(0, "g", "{}")],
        ),
        (
            f"Hm. <|action_start|> <|plugin|>{OBJECT}<|action_end|>",
            [text("Hm. "), call(0, "f", X)],
        ),
        ("<|action_start|><|interpreter|>1", [text("<|interpreter|>1")]),
    ]


class TestJamba(Family):
    plugin = "tool_parsers:jamba"
    malformed = MALFORMED
    block = ("<tool_calls>[\n    ", ",\n    ", "\n]</tool_calls>")
    sound = SOUND
    cases = [
        (f"<tool_calls>[\n    {OBJECT}\n]</tool_calls>", [call(0, "f", X)]),
        (f"Hm. <tool_calls>[{OBJECT}", [text("Hm. "), call(0, "f", X)]),
        ("<tool_calls>[]</tool_calls> none", [text("[] none")]),
    ]


class TestPhi4Mini(Family):
    plugin = "tool_parsers:phi4_mini_json"
    malformed = MALFORMED
    block = ("functools[", ", ", "]")
    sound = SOUND
    cases = [
        (f"functools[{OBJECT}]", [call(0, "f", X)]),
        (f"<|tool_call|>[{OBJECT}]<|/tool_call|>", [call(0, "f", X)]),
        ("Use functools.cache.", [text("Use functools.cache.")]),
        ("functools", [text("functools")]),
    ]


class TestXlam(Family):
    plugin = "tool_parsers:xlam"
    malformed = MALFORMED
    block = ("[", ", ", "]")
    sound = SOUND
    cases = [
        (f"[{OBJECT}, {OBJECT}]", [call(0, "f", X), call(1, "f", X)]),
        (f"Hm.\n```json\n[{OBJECT}]\n```", [text("Hm.\n"), call(0, "f", X)]),
        (f"<tool_call>[{OBJECT}]</tool_call>", [call(0, "f", X)]),
        ('```json\n[{"name": "Bob"}]\n```', [text('```json\n[{"name": "Bob"}]\n```')]),
        (f"like [{OBJECT}]", [text(f"like [{OBJECT}]")]),
    ]


BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


class TestDeepSeekV3(Family):
    plugin = "tool_parsers:deepseek_v3"
    malformed = (
        "f<｜tool▁sep｜>{}",
        "function<｜tool▁sep｜>\n```json\n{}\n```",
        "function<｜tool▁sep｜>f\n```json\n[1]\n```",
        "function<｜tool▁sep｜>f\n```json\n{x: 1}\n```",
    )
    block = (f"<｜tool▁calls▁begin｜>{BEGIN}", f"{END}\n{BEGIN}", f"{END}<｜tool▁calls▁end｜>")
    sound = 'function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```'
    cases = [
        (
            f"Hm.<｜tool▁calls▁begin｜>{BEGIN}function<｜tool▁sep｜>f\n```json\n{X}\n```{END}"
            f"\n{BEGIN}function<｜tool▁sep｜>g\n```json\n{{}}\n```{END}<｜tool▁calls▁end｜>",
            [text("Hm."), call(0, "f", X), call(1, "g", "{}")],
        ),
        (f"{BEGIN}function<｜tool▁sep｜>f\n```json\n{X}", [call(0, "f", X)]),
    ]


class TestDeepSeekV31(Family):
    plugin = "tool_parsers:deepseek_v31"
    malformed = ("f{}", "<｜tool▁sep｜>{}", "f<｜tool▁sep｜>[1]", "f<｜tool▁sep｜>{x: 1}")
    block = (f"<｜tool▁calls▁begin｜>{BEGIN}", f"{END}{BEGIN}", f"{END}<｜tool▁calls▁end｜>")
    sound = 'f<｜tool▁sep｜>{"x": 1}'
    cases = [
        (
            f"<｜tool▁calls▁begin｜>{BEGIN}f<｜tool▁sep｜>{X}{END}{BEGIN}g<｜tool▁sep｜>{{}}{END}"
            "<｜tool▁calls▁end｜> ok",
            [call(0, "f", X), call(1, "g", "{}"), text(" ok")],
        ),
        (f"{BEGIN}f{BEGIN}f<｜tool▁sep｜>{X}{END}", [text("f"), call(0, "f", X)]),
    ]


class TestKimiK2(Family):
    plugin = "tool_parsers:kimi_k2"
    malformed = (
        "f<|tool_call_argument_begin|>{}",
        "functions.f:0{}",
        "functions.f:0<|tool_call_argument_begin|>[]",
        "functions.f:0<|tool_call_argument_begin|>{x: 1}",
    )
    block = (
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        "<|tool_call_end|><|tool_call_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    )
    sound = 'functions.f:0<|tool_call_argument_begin|>{"x": 1}'
    cases = [
        (
            f"Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.f:3"
            f"<|tool_call_argument_begin|>{X}<|tool_call_end|><|tool_calls_section_end|>",
            [text("Hm. "), call(0, "f", X)],
        ),
        ("<|tool_calls_section_begin|>", []),
    ]


def test_ids_are_the_model_s_own() -> None:
    tokenizer: Any = CodePointTokenizer()
    parser: Any = PluginManager().create(TOOL_PARSERS, "kimi_k2", tokenizer=tokenizer, tools=[])
    for i in (3, 4):
        parser.feed(f"<|tool_call_begin|>functions.f:{i}<|tool_call_argument_begin|>[", ())
        parser.feed(f"<|tool_call_begin|>functions.f:{i}<|tool_call_argument_begin|>{{}}", ())
        assert parser.call_id() == f"functions.f:{i}"


def test_a_header_behind_a_header_counts_alone() -> None:
    """A grammar of calls that begins behind the header of one makes the model write its own."""
    tokenizer: Any = CodePointTokenizer()
    for pieces in (
        [f"{TO_F}{TO_F}{X}<|call|>"],
        list(f"{TO_F}<|start|>assistant{TO_F}{X}<|call|>"),
    ):
        parser = PluginManager().create(TOOL_PARSERS, "harmony", tokenizer=tokenizer, tools=[])
        deltas = [delta for piece in pieces for delta in parser.feed(piece, ())]
        assert merge_adjacent([*deltas, *parser.finish()]) == [call(0, "f", X)]


TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


class TestHarmony(Family):
    plugin = "tool_parsers:harmony"
    malformed = (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>[1]",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{x: 1}",
    )
    block = ("", "<|end|><|start|>assistant", "<|call|>")
    sound = f'{TO_F}{{"x": 1}}'
    cases = [
        (f"{TO_F}{X}<|call|>", [call(0, "f", X)]),
        (
            f"<|channel|>commentary<|message|>Now.<|end|><|start|>assistant{TO_F}{X}<|call|>"
            f"<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{{}}<|call|>",
            [text("Now."), call(0, "f", X), call(1, "g", "{}")],
        ),
        ("<|channel|>final<|message|>Hi.<|return|>", [text("Hi.")]),
    ]

    def without_tags(self, output: str) -> str:
        """Headers of messages that are complete are signs for the parser too."""
        return super().without_tags(drop_headers(output))


def drop_headers(output: str) -> str:
    """Without the headers that end and name no function."""
    *messages, last = output.split("<|message|>")
    kept = []
    for message in messages:
        start = max(message.rfind("<|start|>"), 0)
        if not start:
            start = max(message.find("<|channel|>"), 0)
        kept.append(message if "to=functions." in message[start:] else message[:start])
    return "<|message|>".join([*kept, last])


class Elements(Family):
    streams = False
    tools: ClassVar = ToolParserSuite.tools


class TestQwen3Coder(Elements):
    plugin = "tool_parsers:qwen3_coder"
    malformed = (
        "<function=>\n</function>",
        "<function=f>\nx\n</function>",
        "<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=x>\n2\n</parameter>\n</function>",
        "<function=f></tool_call>",
    )
    block = ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
    sound = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"
    cases = [
        (
            "Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSt. <b>\n\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            [text("Hm.\n"), call(0, "get_weather", '{"city": "St. <b>\\n", "days": 3}')],
        ),
        ("<function=g>\n</function>\n</tool_call> ok", [call(0, "g", "{}"), text(" ok")]),
        (
            "<function=f><parameter=x>\n</function>\n</parameter></function>",
            [call(0, "f", '{"x": "</function>"}')],
        ),
        ("<tool_call>\n<function=f>\n<param", [text("\n<function=f>\n<param")]),
    ]


class TestGlm4Moe(Elements):
    plugin = "tool_parsers:glm4_moe"
    malformed = (
        "\n",
        "f\n<arg_key>x</arg_key>\n",
        "f\n<arg_key></arg_key><arg_key>x</arg_key><arg_value>1</arg_value>\n",
        "f g\n",
    )
    block = ("<tool_call>", "</tool_call>\n<tool_call>", "</tool_call>")
    sound = "f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
    cases = [
        (
            "Hm.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
            [text("Hm.\n"), call(0, "get_weather", '{"city": "12", "days": 12}')],
        ),
        ("<tool_call>g</tool_call>", [call(0, "g", "{}")]),
        (
            "<tool_call>f<arg_key>x</arg_key><arg_value>[1, True</arg_value></tool_call> ok",
            [call(0, "f", '{"x": "[1, True"}'), text(" ok")],
        ),
    ]


class TestMiniMaxM2(Elements):
    plugin = "tool_parsers:minimax_m2"
    malformed = (
        '<invoke name="">\n</invoke>',
        '<invoke name="f">\nx\n</invoke>',
        '<invoke name="f">\n<parameter name="">1</parameter>\n</invoke>',
    )
    block = ("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>")
    sound = '<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>'
    cases = [
        (
            'Hm.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{"a": NaN}</parameter>\n'
            '</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
            [text("Hm.\n"), call(0, "f", '{"x": "{\\"a\\": NaN}"}'), call(1, "g", "{}")],
        ),
        ("<minimax:tool_call>\nnone", [text("\nnone")]),
    ]


@pytest.mark.parametrize("key", ["llama4_pythonic", "glm45", "qwen3_xml", "openai"])
def test_other_names_are_the_same_parsers(key: str) -> None:
    tokenizer: Any = CodePointTokenizer()
    parser = PluginManager().create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=[])
    assert parser.feed("plain ", ()) + parser.finish()


@pytest.mark.parametrize("key", ["deepseek_v3", "harmony"])
def test_a_header_without_an_end_is_text(key: str) -> None:
    tokenizer: Any = CodePointTokenizer()
    parser = PluginManager().create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=[])
    begin, name = {"deepseek_v3": BEGIN, "harmony": "<|channel|>"}[key], "n" * 600
    assert parser.feed(begin + name, ()) == [text(name)]
