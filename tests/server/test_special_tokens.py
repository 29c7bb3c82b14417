"""Special tokens: kept for the parser that reads them, and out of everybody's sight."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import events, serving

from treadle.api.sampling_params import SamplingParams
from treadle.outputs import CompletionOutput
from treadle_server.testing.engine import CharacterTokenizer

SPECIAL = {"\ue000": "[TOOL_CALLS]", "\ue001": "[ARGS]", "\ue002": "<think>", "\ue003": "</think>"}
SPECIAL |= {"\ue004": "<|turn|>"}
TOOLS = [{"type": "function", "function": {"name": n}} for n in ("f", "g")]


class Marked(CharacterTokenizer):
    special_token_ids = frozenset(map(ord, SPECIAL))

    def id_to_token(self, token: int) -> str:
        return SPECIAL.get(chr(token), chr(token))


class MarkedEngine(ScriptedEngine):
    """Shows its special tokens only if it is asked to, as the real one does."""

    def __init__(self, text: str) -> None:
        super().__init__(list(text))
        self.tokenizer = Marked()

    def _one(
        self, index: int, piece: str, reason: str | None, params: SamplingParams
    ) -> CompletionOutput:
        output = super()._one(index, piece, reason, params)
        output.text = SPECIAL.get(piece, piece)
        if piece in SPECIAL and params.skip_special_tokens:
            output.text = ""
        return output


WHOLE = '\ue002hm\ue003\ue004 a <|turn|> \ue000f\ue001{"x": 1}\ue000g\ue001{}'
OPTIONS = {"tool_call_parser": "mistral", "reasoning_parser": "qwen3"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_parser_sees_its_tags_and_clients_see_none(stream: bool) -> None:
    engine = MarkedEngine(WHOLE)
    async with serving(engine, **OPTIONS) as server:
        response = await server.chat(tools=TOOLS, stream=stream)
    assert engine.params is not None and engine.params.skip_special_tokens is False
    content, thought, names = "", "", []
    bodies = events(response.text)[:-1] if stream else [response.json()]
    for part in bodies:
        for choice in part["choices"]:
            message: Any = choice["delta"] if stream else choice["message"]
            content += message.get("content") or ""
            thought += message.get("reasoning") or ""
            for call in message.get("tool_calls") or ():
                if name := call["function"].get("name"):
                    names.append(name)
                    assert len(call["id"]) == 9 and call["id"].isalnum()
    # What was written like a special token, letter by letter, is text.
    assert (content, thought, names) == ("a <|turn|> ", "hm", ["f", "g"])


async def test_without_a_parser_that_reads_them_they_are_left_out() -> None:
    engine = MarkedEngine(WHOLE)
    async with serving(engine, tool_call_parser="pythonic") as server:
        message = (await server.chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert engine.params is not None and engine.params.skip_special_tokens
        assert message["content"] == 'hm a <|turn|> f{"x": 1}g{}'
    engine = MarkedEngine(WHOLE)
    async with serving(engine, tool_call_parser="mistral") as server:
        message = (await server.chat()).json()["choices"][0]["message"]  # no tools, no parser
        assert engine.params is not None and engine.params.skip_special_tokens
        assert message["content"] == 'hm a <|turn|> f{"x": 1}g{}'


async def test_who_wants_to_see_all_of_them_does() -> None:
    async with serving(MarkedEngine("\ue004a\ue000f\ue001{}\ue004"), **OPTIONS) as server:
        response = await server.chat(tools=TOOLS, skip_special_tokens=False)
    message = response.json()["choices"][0]["message"]
    assert message["content"] == "<|turn|>a<|turn|>" and len(message["tool_calls"]) == 1
