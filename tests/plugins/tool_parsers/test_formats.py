"""Outputs in the exact format of each family, as its chat template writes a call of the past."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from treadle.api.kinds import TOOL_PARSERS
from treadle.api.parsers import Tool, ToolCallDelta
from treadle.plugins import PluginManager
from treadle.testing.parsers import merge_adjacent
from treadle.testing.streams import CodePointTokenizer, collect

Call = tuple[str, Mapping[str, Any]]
TOOLS = [
    Tool(
        name,
        "",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "flag": {"type": "boolean"},
                "items": {"type": "array"},
                "object": {"type": "object"},
                "unit": {"enum": ["celsius", "fahrenheit", 7]},
                "none": {"type": ["null", "integer"]},
            },
        },
    )
    for name in ("get_weather", "search-web_2", "math.sum")
]
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"text": "Paris"},
    {"text": ""},
    {"text": "12"},
    {"text": 'He said "hi" \\ and left', "count": -3},
    {"text": "def f(x):\n\treturn {'a': [x]}  # }]\n"},
    {"text": "Zürich 世界 👩‍👩‍👧 < & >", "unit": "celsius"},
    {"count": 0, "ratio": -1.5e-3, "flag": True, "none": None},
    {"items": [1, "two", [3.5, None], {"four": False}], "object": {"a": {"b": []}}},
    {"unit": 7, "text": "null", "flag": False, "object": {}},
]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(calls: Sequence[Call], key: str = "arguments") -> list[str]:
    return [f'{{"name": {dumps(name)}, "{key}": {dumps(arguments)}}}' for name, arguments in calls]


def granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>[{', '.join(objects(calls))}]"


def granite_20b(calls: Sequence[Call]) -> str:
    return "\n".join(f"<function_call> {call}" for call in objects(calls))


def internlm(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|action_start|><|plugin|>\n{call}<|action_end|>\n"
        for call in objects(calls, "parameters")
    )


def jamba(calls: Sequence[Call]) -> str:
    return "<tool_calls>[\n    " + ",\n    ".join(objects(calls)) + "\n]</tool_calls>"


def functools(calls: Sequence[Call]) -> str:
    return f"functools[{', '.join(objects(calls))}]"


def phi4(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>[{', '.join(objects(calls))}]<|/tool_call|>"


def xlam(calls: Sequence[Call]) -> str:
    return f"\n[{', '.join(objects(calls))}]"


def fenced(calls: Sequence[Call]) -> str:
    return f"\n```json\n[{', '.join(objects(calls))}]\n```"


def deepseek_v3(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(arguments)}"
        "<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}"
        "<|call|>"
        for name, arguments in calls
    )


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def qwen3_coder(calls: Sequence[Call]) -> str:
    written = ""
    for name, arguments in calls:
        written += f"\n<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            written += f"<parameter={key}>\n{plain(value)}\n</parameter>\n"
        written += "</function>\n</tool_call>"
    return written


def glm(calls: Sequence[Call]) -> str:
    written = ""
    for name, arguments in calls:
        written += f"\n<tool_call>{name}\n"
        for key, value in arguments.items():
            written += f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
        written += "</tool_call>"
    return written


def minimax(calls: Sequence[Call]) -> str:
    written = "<minimax:tool_call>\n"
    for name, arguments in calls:
        written += f'<invoke name="{name}">\n'
        for key, value in arguments.items():
            written += f'<parameter name="{key}">{plain(value)}</parameter>\n'
        written += "</invoke>\n"
    return f"{written}</minimax:tool_call>"


FORMATS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "granite": ("granite", granite),
    "granite-20b-fc": ("granite-20b-fc", granite_20b),
    "internlm": ("internlm", internlm),
    "jamba": ("jamba", jamba),
    "functools": ("phi4_mini_json", functools),
    "phi4": ("phi4_mini_json", phi4),
    "xlam": ("xlam", xlam),
    "xlam, fenced": ("xlam", fenced),
    "deepseek v3": ("deepseek_v3", deepseek_v3),
    "deepseek v3.1": ("deepseek_v31", deepseek_v31),
    "kimi k2": ("kimi_k2", kimi),
    "harmony": ("harmony", harmony),
    "openai": ("openai", harmony),
    "qwen3 coder": ("qwen3_coder", qwen3_coder),
    "glm 4.5": ("glm4_moe", glm),
    "minimax m2": ("minimax_m2", minimax),
}
PLUGINS = PluginManager()


def corpus() -> list[tuple[str, list[Call]]]:
    """What stands before the calls, and the calls: one of each kind, two, and three."""
    found: list[tuple[str, list[Call]]] = []
    for i, arguments in enumerate(ARGUMENTS):
        name, other = TOOLS[i % 3].name, TOOLS[(i + 1) % 3].name
        after = ARGUMENTS[(i + 3) % len(ARGUMENTS)]
        found.append(("", [(name, arguments)]))
        found.append(("I'll look: a < b.\n", [(name, arguments)]))
        found.append(("", [(name, arguments), (other, after)]))
        found.append(("Two\nthings.", [(name, arguments), (name, arguments), (other, after)]))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_calls_as_the_template_writes_them(name: str) -> None:
    key, write = FORMATS[name]
    tokenizer: Any = CodePointTokenizer()
    for text, calls in corpus():
        output = text + write(calls)
        results = []
        for size in (len(output), 4, 1):
            parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=TOOLS)
            pieces = [output[i : i + size] for i in range(0, len(output), size)]
            deltas = [delta for piece in pieces for delta in parser.feed(piece, ())]
            results.append(merge_adjacent([*deltas, *parser.finish()]))
        assert results[0] == results[1] == results[2], output
        read = [d for d in results[0] if isinstance(d, ToolCallDelta)]
        assert [(d.name, json.loads(d.arguments)) for d in read] == calls, output
        assert collect(results[0]).strip() == text.strip(), output
