"""Outputs in the exact format of each family, as its chat template writes a call of the past."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from treadle.api.kinds import STRUCTURED_OUTPUT, TOOL_PARSERS
from treadle.api.parsers import Tool, ToolCallDelta
from treadle.errors import RequestError
from treadle.plugins import PluginManager
from treadle.testing.grammars import ByteTokenizer, sample_texts
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


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects(calls))


def llama3(calls: Sequence[Call]) -> str:
    return "\n" + "; ".join(objects(calls, "parameters"))


def llama3_tagged(calls: Sequence[Call]) -> str:
    return f"<|python_tag|>{llama3(calls).lstrip()}"


def mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS][{', '.join(objects(calls))}]"


def mistral_v11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def mistral_v13(calls: Sequence[Call]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{dumps(arguments)}" for name, arguments in calls
    )


def pythonic(calls: Sequence[Call]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


def llama4(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


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
    "hermes": ("hermes", hermes),
    "llama 3": ("llama3_json", llama3),
    "llama 3, with its tag": ("llama3_json", llama3_tagged),
    "mistral": ("mistral", mistral),
    "mistral v11": ("mistral", mistral_v11),
    "mistral v13": ("mistral", mistral_v13),
    "pythonic": ("pythonic", pythonic),
    "llama 4": ("llama4_pythonic", llama4),
}
OTHER_NAMES = {"glm45", "qwen3_xml"}
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


PARSERS = sorted({key for key, _ in FORMATS.values()} - {"openai", "llama4_pythonic"})


def parse(key: str, pieces: Sequence[str]) -> list[Any]:
    tokenizer: Any = CodePointTokenizer()
    parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=TOOLS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece, ())]
    return merge_adjacent([*deltas, *parser.finish()])


def tags_of(key: str) -> Sequence[str]:
    tokenizer: Any = CodePointTokenizer()
    parser: Any = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=TOOLS)
    tags: Sequence[str] = parser.special_tags
    return tags


def cut(output: str, size: int) -> list[str]:
    return [output[i : i + size] for i in range(0, len(output), size)]


def test_every_parser_is_here() -> None:
    assert set(PLUGINS.keys("tool_parsers")) <= {key for key, _ in FORMATS.values()} | OTHER_NAMES
    assert len(corpus()) >= 40


@pytest.mark.parametrize("name", FORMATS)
def test_calls_as_the_template_writes_them(name: str) -> None:
    key, write = FORMATS[name]
    for text, calls in corpus():
        output = text + write(calls)
        results = [parse(key, cut(output, size)) for size in (len(output), 4, 1)]
        assert results[0] == results[1] == results[2], output
        read = [d for d in results[0] if isinstance(d, ToolCallDelta)]
        assert [(d.name, json.loads(d.arguments)) for d in read] == calls, output
        assert collect(results[0]).strip() == text.strip(), output


@pytest.mark.parametrize("name", FORMATS)
def test_an_output_that_breaks_off_is_no_half_call(name: str) -> None:
    """Wherever it ends: a call has its name, and arguments in which something stands."""
    key, write = FORMATS[name]
    output = write([("get_weather", {"text": "Paris", "count": 3}), ("math.sum", {})])
    for end in range(len(output)):
        for delta in parse(key, [output[:end]]):
            if isinstance(delta, ToolCallDelta):
                assert delta.name in ("get_weather", "math.sum"), output[:end]
                assert len(delta.arguments) > 1, f"half a call of {output[:end]!r}"


@pytest.mark.parametrize("key", PARSERS)
def test_tags_alone_are_nothing(key: str) -> None:
    tags = tags_of(key)
    for one in tags:
        for other in tags:
            output = f"{one} {other}"
            for size in (len(output), 1):
                deltas = parse(key, cut(output, size))
                assert not any(isinstance(delta, ToolCallDelta) for delta in deltas), output
                assert not collect(deltas).strip(), output


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_model_repeats_takes_linear_time(name: str) -> None:
    """In one piece: the suite cuts such texts into small ones."""
    key, write = FORMATS[name]
    call = write([("get_weather", {"object": {"key": 0}})])
    before, _, after = call.partition("0")
    tag = tags_of(key)[0]
    shapes: dict[str, Callable[[int], str]] = {
        "calls": lambda n: call * (n // len(call)),
        "calls that break off": lambda n: before * (n // len(before)),
        "open tags": lambda n: tag * (n // len(tag)),
        "halves of tags": lambda n: f"{tag[:-1]} " * (n // len(tag)),
        "objects in objects": lambda n: before + '{"key":' * (n // 7),
        "a number": lambda n: f"{before}{'9' * n}{after}",
        "escapes": lambda n: before + r'"\ud800\n' * (n // 9) + after,
        "wrong escapes": lambda n: before + r'"\q' * (n // 3) + after,
    }
    for shape, text in shapes.items():
        short, long = (min(seconds(key, text(n)) for _ in range(2)) for n in (4_000, 32_000))
        # Eight times the text; something quadratic takes 64 times as long.
        assert long < 24 * short + 0.05, f"{shape}: {short:.4f} s, eight times of it {long:.4f}"


def seconds(key: str, output: str) -> float:
    start = time.thread_time()
    parse(key, [output])
    return time.thread_time() - start


STRICT = [
    Tool(
        "get_weather",
        "",
        {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "St. <b>"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    Tool("loose", "", {"type": "object", "properties": {"x": {"type": "string"}}}),
]
RIGHT: Call = ("get_weather", {"city": "Paris", "days": 3})
LOOSE: Call = ("loose", {"x": "y"})
WRONG: list[Call] = [
    ("get_weather", {"city": "Rome", "days": 3}),
    ("get_weather", {"city": "Paris"}),
    ("get_weather", {"city": "Paris", "days": 12}),
    ("get_weather", {}),
]
# Models whose vocabulary has [ARGS] write v11 or v13, and the others the list.
SPELLINGS = [
    (name, with_tokens)
    for name in FORMATS
    for with_tokens in (False, True)
    if with_tokens != (name == "mistral") or "mistral" not in name
]


def encode(output: str, tokenizer: ByteTokenizer) -> list[int]:
    """Return ids in which each tag is the token that it is."""
    tags = {tag: id for id, tag in tokenizer.special.items()}
    parts = re.split(f"({'|'.join(map(re.escape, tags))})", output) if tags else [output]
    return [id for part in parts for id in ([tags[part]] if part in tags else part.encode())]


@pytest.mark.parametrize(("name", "with_tokens"), SPELLINGS)
def test_strict_calls_are_enforced_where_calls_are_free(name: str, with_tokens: bool) -> None:
    """Whether the tags are tokens or text: right calls can be written, wrong ones cannot."""
    key, write = FORMATS[name]
    tokenizer: Any = ByteTokenizer(*(tags_of(key) if with_tokens else ()))
    parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=STRICT)
    spec = parser.grammar_for_tool_choice("auto")
    if spec is None:
        assert name in ("harmony", "openai") and not with_tokens
        return
    compiler = PLUGINS.create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    assert compiler.unsupported_reason(spec) is None
    grammar = compiler.compile(spec)

    def is_allowed(output: str) -> bool:
        matcher = grammar.matcher()
        ids = encode(output, tokenizer)
        return all(matcher.accept_token(id) for id in ids) and matcher.is_accepting

    for text in ("", "Hello < { [ world.\n"):
        assert is_allowed(text)
        for calls in ([RIGHT], [LOOSE], [RIGHT, LOOSE], [LOOSE, RIGHT], [RIGHT, RIGHT]):
            assert is_allowed(text + write(calls)), text + write(calls)
        for wrong in WRONG:
            for calls in ([wrong], [RIGHT, wrong], [LOOSE, wrong]):
                assert not is_allowed(text + write(calls)), text + write(calls)


@pytest.mark.parametrize("key", PARSERS)
@pytest.mark.parametrize("parameters", [{"properties": [1]}, {"required": 5}, {"required": [1]}])
def test_what_is_no_schema_is_refused(key: str, parameters: Any) -> None:
    tokenizer: Any = ByteTokenizer("[TOOL_CALLS]", "[ARGS]")
    tools = [Tool("f", "", parameters, strict=True)]
    parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=tools)
    with pytest.raises(RequestError, match="no JSON schema") as error:
        parser.grammar_for_tool_choice("required")
    assert error.value.param == "tools"


UNWRITABLE = {
    "deepseek_v3": "a b",
    "deepseek_v31": "a b",
    "kimi_k2": "a b",
    "harmony": "a b",
    "qwen3_coder": "a b",
    "glm4_moe": "a<b",
    "minimax_m2": 'a"b',
    "pythonic": "a/b",
    "mistral": "a b",
}


@pytest.mark.parametrize("key", PARSERS)
def test_a_name_is_written_as_it_is_read_or_refused(key: str) -> None:
    tokenizer: Any = (
        ByteTokenizer("[TOOL_CALLS]", "[ARGS]") if key == "mistral" else ByteTokenizer()
    )
    schema = {"type": "object", "properties": {}, "additionalProperties": False}

    def grammar(name: str, choice: Any = None, *, strict: bool = False) -> Any:
        tools = [Tool("good", "", schema), Tool(name, "", schema, strict=strict)]
        parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=tools)
        return parser.grammar_for_tool_choice(choice or {"function": {"name": name}})

    for name in ("search-web_2", "math.sum", "x" * 64):
        (output,) = sample_texts(PLUGINS, grammar(name), 1, tokenizer=tokenizer)
        tools = [Tool(name, "", schema)]
        parser = PLUGINS.create(TOOL_PARSERS, key, tokenizer=tokenizer, tools=tools)
        deltas = merge_adjacent([*parser.feed(output, ()), *parser.finish()])
        assert [getattr(delta, "name", None) for delta in deltas] == [name], output
    if key in UNWRITABLE:
        for choice in (None, "required"):
            with pytest.raises(RequestError, match="has a name that cannot be written") as error:
                grammar(UNWRITABLE[key], choice)
            assert error.value.param == "tools"
        if key != "harmony":  # whose tags are no tokens here
            loose = grammar(UNWRITABLE[key], "auto")
            assert "good" in loose.source and json.dumps(UNWRITABLE[key]) not in loose.source
        with pytest.raises(RequestError, match="has a name that cannot be written"):
            grammar(UNWRITABLE[key], "auto", strict=True)
