"""Calls of gpt-oss, in OpenAI's Harmony format.

::

    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The format of gpt-oss (https://cookbook.openai.com/articles/openai-harmony). An output is a row of
messages, each with a header; those to a function are calls, and the headers of the others are
dropped. What is a thought, the reasoning parser ``harmony`` tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from treadle.api.types import GrammarSpec, Tool
from treadle_parsing_kit.incremental_json import BLANKS
from treadle_parsing_kit.json_calls import ArgumentsReader, is_name
from treadle_parsing_kit.named_family import NamedFamilyParser, NamedFormat
from treadle_parsing_kit.tool_choice import ANYWHERE, arguments_rule, tag_rule

__all__ = ("Harmony",)

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"


class Harmony(NamedFamilyParser):
    format = NamedFormat(
        begin=CHANNEL,
        header=re.compile(r".*?\bto=functions\.(?P<name>[^\s<]+).*", re.DOTALL),
        special_tags=(
            START,
            CHANNEL,
            MESSAGE,
            "<|constrain|>",
            "<|call|>",
            "<|end|>",
            "<|return|>",
        ),
        wrappers=(START,),
        closers=("<|call|>", "<|end|>"),
        block=((), ("<|call|>", START, "assistant"), ()),
        head=(CHANNEL, "commentary to=functions.{name} ", "<|constrain|>", "json", MESSAGE),
    )

    _name = ""

    def _enter(self, tag: str) -> None:
        self.call_prefix.append(tag)
        self.begin_call()
        self.mode = self.read_call

    def read_call(self, text: str, pos: int) -> int:
        """Read the header of a message."""
        before, tag, end = self.scan(text, pos, MESSAGE, START)
        self._header.append(before)
        self.call_prefix += [before, tag]
        if tag == START:
            self.call_prefix.pop()
            return self.restart(tag, end)
        if tag:
            match = self.format.header.fullmatch("".join(self._header))
            if match is not None and is_name(match["name"]):
                self._name, self.mode = match["name"], self._read_arguments
                return end
            self.call_prefix.clear()
            return self.abandon_call(end)
        return self.abandon_call(end) if sum(map(len, self._header)) > 512 else end

    def _read_arguments(self, text: str, pos: int) -> int:
        for tag in (CHANNEL, START):
            end = self.expect_tag(text, pos, tag)
            if end is not None:
                if not self.pending:  # another header: nothing came of the one before
                    self.call_prefix.clear()
                    self._enter(tag)
                return end
        if text[pos] == "{":
            self.start_call(ArgumentsReader(self.calls, self._name))
        elif text[pos] not in BLANKS:
            return self.abandon_call(pos)
        else:
            self.call_prefix.append(text[pos])
            return pos + 1
        return pos

    def grammar_for_tool_choice(self, choice: str | Mapping[str, Any]) -> GrammarSpec | None:
        tags = {tag: tag_rule(tag, self._tokenizer) for tag in self.special_tags}
        are_tokens = all(rule.startswith("<[") for rule in tags.values())
        if choice == "auto":
            tools = self.writable_tools(choice)
            return self._text_with_calls(tools, tags) if tools and are_tokens else None
        spec = super().grammar_for_tool_choice(choice)
        if spec is None or not are_tokens:
            return spec
        answer = f'{tags[CHANNEL]} "final" {tags[MESSAGE]}'
        return replace(spec, options={"heads": (_thoughts(tags, ""), _thoughts(tags, answer))})

    def _text_with_calls(self, tools: Sequence[Tool], tags: Mapping[str, str]) -> GrammarSpec:
        """Messages, of which those to functions are calls. Thoughts are among them."""
        lines = [
            "start: free_text ((call | tag) free_text)*",
            "free_text: FREE_TEXT",
            f"FREE_TEXT: /{ANYWHERE}/ & ~/{ANYWHERE}to=functions\\.{ANYWHERE}/",
            f"tag: {' | '.join(tags.values())}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
        ]
        for i, tool in enumerate(tools):
            head = self.rule([piece.replace("{name}", tool.name) for piece in self.format.head])
            arguments = arguments_rule(tool, "auto")
            lines.append(f"call_{i}: {head} arguments_{i} {tags['<|call|>']}")
            lines.append(f"arguments_{i}: {arguments}")
        return GrammarSpec("ebnf", "\n".join(lines), {"reasoning": ""})


def _thoughts(tags: Mapping[str, str], head: str) -> str:
    """Return the grammar of thoughts, behind which the expression ``head`` follows."""
    channel, message = tags[CHANNEL], tags[MESSAGE]
    behind = f'{tags["<|end|>"]} {tags[START]} "assistant"'
    lines = [
        f"start: thought* {head}",
        f'thought: {channel} "analysis" {message} TEXT {behind}',
        f"TEXT: /{ANYWHERE}/",
    ]
    return "\n".join(lines)
