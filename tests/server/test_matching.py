"""``--tool-call-parser auto`` and ``--reasoning-parser auto``: what a server does that nobody told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import serving

from treadle.api.matching import ModelTraits
from treadle.config import PluginConfig
from treadle.plugins import PluginManager

QWEN3 = ModelTraits(templates={"default": 'arguments <tool_call> <think> </think>"'})
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'

RIVAL = """
from treadle.api import impl
from treadle.api.matching import Match

TREADLE = {"tool_parsers": ["rival"]}


@impl
def treadle_match(kind, key, model):
    return Match(100, "it wants everything") if key == "rival" else None
"""


async def chat_body(pieces: list[str], options: dict[str, Any], **fields: Any) -> dict[str, Any]:
    async with serving(ScriptedEngine(pieces, traits=QWEN3), **options) as server:
        response = await server.chat(**fields)
    body: dict[str, Any] = response.json()
    return body


async def test_nobody_names_a_parser_and_both_work() -> None:
    body = await chat_body(["<think>hm</think>", CALL], {}, tools=TOOLS)
    message = body["choices"][0]["message"]
    assert message["reasoning"] == "hm"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


async def test_without_tools_text_that_looks_like_a_call_is_text() -> None:
    body = await chat_body([f"a {CALL}"], {})
    assert body["choices"][0]["message"]["content"] == f"a {CALL}"


async def test_none_switches_a_parser_off() -> None:
    off = {"tool_call_parser": "none", "reasoning_parser": "none"}
    text = f"<think>hm</think>{CALL}"
    body = await chat_body([text], off)
    assert body["choices"][0]["message"]["content"] == text
    refused = await chat_body([text], off, tools=TOOLS)
    assert "--tool-call-parser" in refused["error"]["message"]


async def test_a_name_counts_more_than_the_match() -> None:
    body = await chat_body(["hm</think>yes"], {"reasoning_parser": "deepseek_r1"})
    assert body["choices"][0]["message"]["reasoning"] == "hm"


async def test_a_model_without_signs_gets_no_parser() -> None:
    async with serving(ScriptedEngine(["<think>hm</think>"])) as server:
        plugins = server.context.chat_processor.parser_plugins
        assert (plugins.tool_call_parser, plugins.reasoning_parser) == (None, None)
        response = await server.chat()
    assert response.json()["choices"][0]["message"]["content"] == "<think>hm</think>"


@pytest.mark.parametrize(
    ("disabled", "parser"), [([], "hermes"), (["tool_parsers:hermes"], "rival")]
)
async def test_an_equal_match_of_a_stranger_takes_nothing(
    tmp_path: Path, disabled: list[str], parser: str
) -> None:
    file = tmp_path / "rival.py"
    file.write_text(RIVAL)
    plugins = PluginManager(PluginConfig(plugin_file=[str(file)], disable_plugin=disabled))
    async with serving(ScriptedEngine(traits=QWEN3, plugins=plugins)) as server:
        assert server.context.chat_processor.parser_plugins.tool_call_parser == parser


async def test_two_equal_strangers_cost_their_feature_only(tmp_path: Path) -> None:
    files = [tmp_path / "rival.py", tmp_path / "other.py"]
    files[0].write_text(RIVAL)
    files[1].write_text(RIVAL.replace('"rival"', '"other"'))
    config = PluginConfig(plugin_file=list(map(str, files)), disable_plugin=["tool_parsers:hermes"])
    engine = ScriptedEngine(["<think>hm</think>yes"], traits=QWEN3, plugins=PluginManager(config))
    async with serving(engine) as server:
        assert (await server.chat()).json()["choices"][0]["message"]["reasoning"] == "hm"
        refused = await server.chat(tools=TOOLS)
    assert refused.status_code == 400
    assert "start it with --tool-call-parser NAME" in refused.json()["error"]["message"]
