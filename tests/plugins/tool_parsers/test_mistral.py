from typing import Any

import pytest

from treadle.api.kinds import TOOL_PARSERS
from treadle.plugins import PluginManager
from treadle.testing.grammars import ByteTokenizer, sample_texts
from treadle.testing.parsers import TOOLS, ToolParserSuite, call, merge_adjacent, text
from treadle.testing.plugin import PluginSuite
from treadle.testing.tool_calls import MALFORMED, SOUND

X = r'{"x": "[ARGS]{}, \"]\\", "y": [[1], {"é": null}]}'
ITEM = f'{{"name": "f", "arguments": {X}}}'


class TestMistral(PluginSuite, ToolParserSuite):
    plugin = "tool_parsers:mistral"
    malformed = MALFORMED
    block = ("[TOOL_CALLS][", ", ", "]")
    sound = SOUND
    cases = [
        (f"[TOOL_CALLS][{ITEM}]", [call(0, "f", X)]),
        (
            f'Hm. [TOOL_CALLS] [ {ITEM} , {{"arguments": {{}}, "name": "g", "id": "abcdefghi"}} ] ok',
            [text("Hm. "), call(0, "f", X), call(1, "g", "{}"), text(" ok")],
        ),
        (f"[TOOL_CALLS] {ITEM}\n", [call(0, "f", X)]),
        (f"[TOOL_CALLS]f{X}", [call(0, "f", X)]),
        (
            f"[TOOL_CALLS]f{X}[TOOL_CALLS]g{{}}\n[TOOL_CALLS] get-weather_2 {X} ok",
            [call(0, "f", X), call(1, "g", "{}"), call(2, "get-weather_2", X), text(" ok")],
        ),
        (
            f"Hm.[TOOL_CALLS]f[ARGS]{X}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{{}}",
            [text("Hm."), call(0, "f", X), call(1, "g", "{}")],
        ),
        (f"[TOOL_CALLS]f[CALL_ID]abc {X}", [call(0, "f", X)]),
        # Cut short: in front of a call as text, behind one it is form.
        (f"[TOOL_CALLS][{ITEM}, ", [call(0, "f", X)]),
        (f'[TOOL_CALLS][{ITEM}, {{"na', [call(0, "f", X), text(', {"na')]),
        ("[TOOL_CALLS]f[ARGS]", [text("f")]),
        ('[TOOL_CALLS]f[ARGS]{"x": 1', [call(0, "f", '{"x": 1')]),
        # Not calls.
        ("[TOOL_CALLS][]", [text("[]")]),
        ("[TOOL_CALLS]", []),
        ("[TOOL_CALLS] begins a call", [text(" begins a call")]),
        ("[TOOL_CALLS]f(x=1)", [text("f(x=1)")]),
        ("[TOOL_CALLS]f[ARGS][ARGS]{}", [text("f{}")]),
        ('[TOOL_CALLS]f[ARGS]{"x" 1}', [text('f{"x" 1}')]),
        (f"[TOOL_CALLS]{'n' * 129}{{}}", [text(f"{'n' * 129}{{}}")]),
    ]


def test_ids_are_what_the_templates_take() -> None:
    tokenizer: Any = object()
    parser: Any = PluginManager().create(TOOL_PARSERS, "mistral", tokenizer=tokenizer, tools=[])
    ids = {parser.call_id() for _ in range(50)}
    assert len(ids) == 50 and all(len(i) == 9 and i.isascii() and i.isalnum() for i in ids)


@pytest.mark.parametrize(
    ("special", "begins"),
    [
        ((), "[TOOL_CALLS][{"),
        (("[TOOL_CALLS]",), "[TOOL_CALLS][{"),
        (("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]get_weather[ARGS]{"),
    ],
)
def test_a_forced_call_is_in_the_model_s_own_form(special: tuple[str, ...], begins: str) -> None:
    plugins = PluginManager()
    if "llguidance" not in plugins.keys("structured_output"):
        pytest.skip("no backend is installed")
    tokenizer: Any = ByteTokenizer(*special)
    opened = [
        plugins.create(TOOL_PARSERS, "mistral", tokenizer=tokenizer, tools=TOOLS) for _ in range(2)
    ]
    spec = opened[0].grammar_for_tool_choice({"function": {"name": "get_weather"}})
    assert spec is not None
    (output,) = sample_texts(plugins, spec, 1, tokenizer=tokenizer)
    assert output.startswith(begins)
    deltas = merge_adjacent([*opened[1].feed(output, ()), *opened[1].finish()])
    assert [getattr(delta, "name", None) for delta in deltas] == ["get_weather"]
