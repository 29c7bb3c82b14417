"""What an output may be if the model may call a tool: calls or an answer, and calls by the schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from treadle.api.kinds import STRUCTURED_OUTPUT, TOOL_PARSERS
from treadle.api.parsers import Tool, ToolCallDelta
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.structured_output import GrammarSpec
from treadle.errors import RequestError
from treadle.plugins import PluginManager
from treadle.testing.grammars import ByteTokenizer, sample_texts
from treadle.text.call_constraint import constraint_with_calls
from treadle.text.parser_plugins import ParserPlugins
from treadle.text.tool_choice import parse_tools

# The same name means something else in the schema of the tool.
SCHEMA: Any = {
    "type": "object",
    "properties": {"sum": {"$ref": "#/$defs/value"}},
    "required": ["sum"],
    "additionalProperties": False,
    "$defs": {"value": {"enum": [1, 2]}},
}
ARGUMENTS: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": ARGUMENTS}}


def parsers(key: str) -> ParserPlugins:
    keys = {"tool_call_parser": key, "reasoning_parser": None}
    return ParserPlugins(PluginManager(), ByteTokenizer(), keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["hermes", "llama3_json", "mistral", "pythonic"])
async def test_an_output_is_a_call_or_an_answer(key: str) -> None:
    plugins = parsers(key)
    answer = StructuredOutputsParams(json=json.dumps(SCHEMA))
    tools = [Tool(name="get_weather", description="", parameters=ARGUMENTS)]
    joined = await constraint_with_calls(tools, answer, plugins, None)
    assert joined is not None and joined.structural_tag is not None and joined.json is None
    kinds = set()
    spec = GrammarSpec("structural_tag", json.dumps(joined.structural_tag))
    for text in sample_texts(plugins.plugins, spec, 12):
        parser = plugins.plugins.create(TOOL_PARSERS, key, tokenizer=ByteTokenizer(), tools=tools)
        calls = [
            d for d in [*parser.feed(text, ()), *parser.finish()] if isinstance(d, ToolCallDelta)
        ]
        kinds.add("call" if calls else "answer")
        if not calls:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert kinds == {"call", "answer"}


async def test_only_json_is_joined() -> None:
    plugins, tools = parsers("hermes"), parse_tools([TOOL])
    other = StructuredOutputsParams(regex="a+")
    assert await constraint_with_calls(tools, None, plugins, None) is None
    assert await constraint_with_calls(tools, other, plugins, None) is other
    formed = StructuredOutputsParams(json_object=True, backend="llguidance")
    joined = await constraint_with_calls(tools, formed, plugins, None)
    assert joined is not None and joined.structural_tag is not None and not joined.json_object
    assert joined.backend == "llguidance"


STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
LOOSE: Any = {"type": "function", "function": {"name": "other", "parameters": ARGUMENTS}}
CALLS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "%s", "arguments": %s}]',
    "granite": '<|tool_call|>[{"name": "%s", "arguments": %s}]',
    "internlm": '<|action_start|><|plugin|>\n{"name": "%s", "parameters": %s}<|action_end|>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0"
    "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>",
}
GOOD, BAD = '{"city": "Paris"}', '{"city": "Rome"}'


def accepts(plugins: ParserPlugins, grammar: str, text: str) -> bool:
    tokenizer: Any = ByteTokenizer()
    compiler = plugins.plugins.create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    matcher = compiler.compile(GrammarSpec("ebnf", grammar)).matcher()
    return all(map(matcher.accept_token, text.encode())) and matcher.is_accepting


@pytest.mark.parametrize("key", CALLS)
async def test_a_strict_tool_is_called_by_its_schema_only(key: str) -> None:
    """Text is free, and so are the arguments of tools that are not strict."""
    plugins = parsers(key)
    strict = await constraint_with_calls(parse_tools([STRICT, LOOSE]), None, plugins, None)
    assert strict is not None and strict.grammar is not None

    def taken(text: str) -> bool:
        return accepts(plugins, strict.grammar or "", text)

    good, bad = (CALLS[key] % ("get_weather", arguments) for arguments in (GOOD, BAD))
    assert taken("a <b> [c] {d}\n") and taken(good) and taken(f"Now: {good}") and taken(f"{good}.")
    assert not taken(bad) and not taken(f"Now: {bad}") and not taken(f"{good}{bad}")
    assert taken(CALLS[key] % ("other", BAD))
    assert not taken(CALLS[key] % ("nobody", GOOD))


@pytest.mark.parametrize("key", ["qwen3_coder", "glm4_moe", "minimax_m2"])
async def test_elements_of_strict_tools_are_enforced(key: str) -> None:
    plugins = parsers(key)
    strict = await constraint_with_calls(parse_tools([STRICT]), None, plugins, None)
    assert strict is not None and strict.grammar is not None
    forced = await plugins.forced_call(parse_tools([STRICT]), {"function": {"name": "get_weather"}})
    (text,) = sample_texts(plugins.plugins, GrammarSpec("ebnf", forced.source), 1)
    assert "Paris" in text and accepts(plugins, strict.grammar, f"Now: {text} ok")
    assert not accepts(plugins, strict.grammar, f"Now: {text.replace('Paris', 'Rome')} ok")
    assert not accepts(plugins, strict.grammar, text.replace("get_weather", "other"))
    mixed = await constraint_with_calls(parse_tools([STRICT, LOOSE]), None, plugins, None)
    assert mixed is not None and mixed.grammar is not None
    other = text.replace("get_weather", "other").replace("Paris", "<b>7</b> </p>\n")
    rome = text.replace("Paris", "Rome")
    for output, is_taken in ((text, True), (rome, False), (other, True), (f"{text} {rome}", False)):
        assert accepts(plugins, mixed.grammar, f"Now: {output} ok") is is_taken, output


def object_call(city: str, name: str = "get_weather", field: str = "parameters") -> str:
    return f'{{"name": "{name}", "{field}": {{"city": "{city}"}}}}'


def listed(*calls: str) -> str:
    return f"[{', '.join(calls)}]"


def harmony(city: str, name: str = "get_weather") -> str:
    """A message to a function; each tag is a token."""
    head = f"\0<|channel|>commentary to=functions.{name} \0<|constrain|>json\0<|message|>"
    return f'{head}{{"city": "{city}"}}\0<|call|>'


PARIS, ROME = object_call("Paris"), object_call("Rome")
OTHER = object_call("Rome", "other")
PARIS_ITEM, ROME_ITEM, OTHER_ITEM = (
    object_call("Paris", field="arguments"),
    object_call("Rome", field="arguments"),
    object_call("Rome", "other", "arguments"),
)
PYTHON_PARIS, PYTHON_ROME = '[get_weather(city="Paris")]', '[get_weather(city="Rome")]'
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>",
                "<|return|>")  # fmt: skip
ANALYSIS = "\0<|channel|>analysis\0<|message|>x\0<|end|>\0<|start|>assistant"
# Parser, special tokens, texts that obey, and texts that do not.
UNTAGGED: list[tuple[str, tuple[str, ...], list[str], list[str]]] = [
    (
        "llama3_json",
        (),
        ["", '{"a": 1}', '{"name": "Bob"}', f"a {ROME}", PARIS, f"x\n {PARIS}; {OTHER}", f"{PARIS} y",
         f"{PARIS} y\n{PARIS}", '```json\n{"x": {}}\n```', f"x <|python_tag|>{OTHER} y"],
        [ROME, f"x\n{ROME}", f"{PARIS}; {ROME}", f"{OTHER}{ROME}", f"{PARIS}\n{ROME}", f"x}}; {ROME}",
         '{ "name" : "get_weather", "parameters": {}}', '{"type": "function", "name": "get_weather"',
         '{"parameters": {', f"<|python_tag|>{ROME}", "<|python_tag|>x"],
    ),
    (
        "llama3_json",
        ("<|python_tag|>",),
        [f"\0<|python_tag|>{PARIS}", f"{PARIS} \0<|python_tag|> {OTHER} y"],
        [f"\0<|python_tag|>{ROME}", f"<|python_tag|>{PARIS}x"[:20], "\0<|python_tag|>z"],
    ),
    (
        "xlam",
        (),
        ["", "[1, 2]", '[{"name": "Bob"}]', f"a {listed(ROME_ITEM)}", listed(PARIS_ITEM),
         f"x\n{listed(PARIS_ITEM, OTHER_ITEM)}", f"```json\n{listed(PARIS_ITEM)}\n```",
         f"{listed(PARIS_ITEM)}\n{listed(PARIS_ITEM)} ok"],
        [listed(ROME_ITEM), f"x\n{listed(ROME_ITEM)}", listed(PARIS_ITEM, ROME_ITEM),
         f"{listed(PARIS_ITEM)}\n{listed(ROME_ITEM)}", f"```json\n{listed(ROME_ITEM)}",
         f"<tool_call>{ROME_ITEM}"],
    ),
    (
        "pythonic",
        (),
        ["", "[see](#b)", PYTHON_PARIS, 'get_weather(city="Rome")', "[other()]",
         'x [get_weather(city="Paris"), other(a=1, b=[2])] y',
         f"<|python_start|>{PYTHON_PARIS}<|python_end|> x"],
        [PYTHON_ROME, "x [get_weather()", '[ get_weather(city="Rome"',
         '[other(), get_weather(city="Rome"', "<|python_start|>x"],
    ),
    (
        "pythonic",
        ("<|python_start|>", "<|python_end|>"),
        [f"\0<|python_start|>{PYTHON_PARIS}\0<|python_end|> x"],
        [f"\0<|python_start|>{PYTHON_ROME}", "\0<|python_start|>x"],
    ),
    (
        "harmony",
        HARMONY_TAGS,
        ["hi", "\0<|channel|>final\0<|message|>hi", ANALYSIS + harmony("Paris"),
         f"{harmony('Paris')}\0<|start|>assistant{harmony('x', 'other')}"],
        [harmony("Rome"), ANALYSIS + harmony("Rome"), "\0<|start|>assistant to=functions.get_weather",
         "\0<|channel|>analysis to=functions.get_weather \0<|message|>{}"],
    ),
]  # fmt: skip


def ids_of(tokenizer: ByteTokenizer, text: str) -> list[int]:
    """The ids of a text in which \\0 stands before each special token."""
    ids: list[int] = []
    for i, part in enumerate(text.split("\0")):
        token, name = next(
            ((t, n) for t, n in tokenizer.special.items() if i and part.startswith(n)), (-1, "")
        )
        ids += [token] * bool(name) + list(part[len(name) :].encode())
    return ids


@pytest.mark.parametrize(("key", "special", "obeying", "others"), UNTAGGED)
async def test_calls_without_a_tag_of_their_own_obey(
    key: str, special: tuple[str, ...], obeying: list[str], others: list[str]
) -> None:
    """What the parser would take for a call is one of a tool, as its schema says; other text is free."""
    tokenizer: Any = ByteTokenizer(*special)
    keys = {"tool_call_parser": key, "reasoning_parser": None}
    plugins = ParserPlugins(PluginManager(), tokenizer, keys)
    strict = await constraint_with_calls(parse_tools([STRICT, LOOSE]), None, plugins, None)
    assert strict is not None and strict.grammar is not None
    compiler = plugins.plugins.create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    grammar = compiler.compile(GrammarSpec("ebnf", strict.grammar))

    def obeys(text: str) -> bool:
        matcher = grammar.matcher()
        return all(map(matcher.accept_token, ids_of(tokenizer, text))) and matcher.is_accepting

    assert [text for text in obeying if not obeys(text)] == []
    assert [text for text in others if obeys(text)] == []


FINAL = "\0<|channel|>final\0<|message|>"
CALL = harmony("Paris").removesuffix("\0<|call|>")  # which ends the output


async def test_messages_of_harmony_are_thoughts_then_calls_or_an_answer() -> None:
    """The grammar reads the headers, so that a call that the model opens obeys its function."""
    tokenizer: Any = ByteTokenizer(*HARMONY_TAGS)
    keys = {"tool_call_parser": "harmony", "reasoning_parser": "harmony"}
    plugins = ParserPlugins(PluginManager(), tokenizer, keys)
    tools, form = parse_tools([STRICT, LOOSE]), StructuredOutputsParams(json=json.dumps(SCHEMA))
    joined = await constraint_with_calls(tools, form, plugins, None)
    strict = await constraint_with_calls(tools, None, plugins, None)
    assert joined is not None and joined.reasoning == ""
    assert strict is not None and strict.reasoning == ""
    spec = GrammarSpec("structural_tag", json.dumps(joined.structural_tag))
    for backend in ("llguidance", "outlines"):
        compiler = plugins.plugins.create(
            STRUCTURED_OUTPUT, backend, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
        )
        grammar = compiler.compile(spec)

        def obeys(text: str, grammar: Any = grammar) -> bool:
            matcher = grammar.matcher()
            return all(map(matcher.accept_token, ids_of(tokenizer, text))) and matcher.is_accepting

        obeying = [f'{FINAL}{{"sum": 1}}', CALL, harmony("Paris") + "\0<|start|>assistant" + CALL]
        others = ['{"sum": 1}', f'{FINAL}{{"sum": 3}}', f"{FINAL}hi", f"{FINAL}{CALL}",
                  CALL.replace("Paris", "Rome"), CALL.replace('{"city": "Paris"}', '{"sum": 1}'),
                  CALL.replace("get_weather", "nobody"), CALL.replace("get_weather", "other") + "x",
                  '\0<|channel|>commentary\0<|message|>{"sum": 1}']  # fmt: skip
        for thoughts in ("", ANALYSIS, ANALYSIS * 2):
            assert [text for text in obeying if not obeys(thoughts + text)] == []
            assert [text for text in others if obeys(thoughts + text)] == []
        assert not obeys(ANALYSIS)


async def test_tags_of_harmony_are_tokens() -> None:
    tools = parse_tools([STRICT])
    assert await constraint_with_calls(tools, None, parsers("harmony"), None) is None


async def test_a_tag_that_is_a_token_begins_a_call() -> None:
    """Its characters, written with other tokens, are text."""
    tokenizer: Any = ByteTokenizer("<tool_call>", "</tool_call>")
    keys = {"tool_call_parser": "hermes", "reasoning_parser": None}
    plugins = ParserPlugins(PluginManager(), tokenizer, keys)
    strict = await constraint_with_calls(parse_tools([STRICT]), None, plugins, None)
    assert strict is not None
    compiler = plugins.plugins.create(
        STRUCTURED_OUTPUT, "llguidance", tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    grammar = compiler.compile(GrammarSpec("ebnf", strict.grammar or ""))
    body = '\n{"name": "get_weather", "arguments": %s}\n'
    for begin, arguments, end, expected in (
        ([256], GOOD, [257], True),
        ([256], BAD, [257], False),
        (list(b"<tool_call>"), BAD, list(b"</tool_call>"), True),
    ):
        matcher = grammar.matcher()
        ids = [*b"Now: ", *begin, *(body % arguments).encode(), *end]
        assert (all(map(matcher.accept_token, ids)) and matcher.is_accepting) is expected


@pytest.mark.parametrize(
    "options", [{"heads": "ab"}, {"heads": ["a"]}, {"heads": ["a", 1]}, {"reasoning": None}]
)
async def test_options_of_a_plugin_are_checked(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = GrammarSpec("ebnf", 'start: "a"', options)
    method = "treadle_hermes.parser.Hermes.grammar_for_tool_choice"
    monkeypatch.setattr(method, lambda *_: spec)
    answer = StructuredOutputsParams(json=json.dumps(SCHEMA))
    with pytest.raises(RequestError, match="cannot force a call"):
        await constraint_with_calls([Tool("f", "", {})], answer, parsers("hermes"), None)
