"""The conformance suites of output parsers.

::

    class TestMine(PluginSuite, ToolParserSuite):
        plugin = "tool_parsers:mine"
        cases = [('hi <call f {"x": 1}>', [text("hi "), call(0, "f", '{"x": 1}')])]


    class TestThoughts(PluginSuite, ReasoningSuite):
        plugin = "reasoning_parsers:mine"
        cases = [("the prompt", "<think>hm</think>yes", [reasoning("hm"), text("yes")])]

Give cases for every form that the format has. The suites cut each of them at every place, end them
there, and go on with something else: what streams must be what is answered whole, and nothing that
the model said may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest

from treadle.api.kinds import REASONING_PARSERS, TOOL_PARSERS
from treadle.api.parsers import (
    Delta,
    ReasoningDelta,
    ReasoningParser,
    StreamParser,
    SupportsReasoningOpener,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolParser,
)
from treadle.api.structured_output import GrammarSpec
from treadle.testing.json_prefix import is_json_prefix
from treadle.testing.streams import (
    HELD,
    ODD,
    PROSE,
    CodePointTokenizer,
    StreamParserSuite,
    collect,
    merged,
)

__all__ = ("ReasoningSuite", "ToolParserSuite", "call", "merged", "reasoning", "text")

TOOLS = (
    Tool("f", "Anything.", {"type": "object", "properties": {"x": {}}}),
    Tool("g", "Nothing.", {}),
    Tool(
        "get_weather",
        "The weather of a place.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"enum": ["metric", "imperial"]},
            },
            "required": ["city", "days"],
        },
    ),
)


def text(said: str) -> TextDelta:
    return TextDelta(said)


def call(index: int, name: str, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(index, name, arguments)


def reasoning(said: str) -> ReasoningDelta:
    return ReasoningDelta(said)


class ToolParserSuite(StreamParserSuite):
    """Calls out of text, and text as it was. ``streams`` is whether arguments are handed on before
    a call is complete; ``prose`` holds no calls."""

    cases: ClassVar[Sequence[tuple[str, Sequence[Delta]]]] = ()
    prose: ClassVar[Sequence[str]] = PROSE
    tools: ClassVar[Sequence[Tool]] = TOOLS
    tokenizer: ClassVar[Any] = CodePointTokenizer()
    streams: ClassVar[bool] = True

    def open(self) -> ToolParser:
        return self.opener.create(
            TOOL_PARSERS, self.key, tokenizer=self.tokenizer, tools=self.tools
        )

    def samples(self) -> Iterator[tuple[str, Callable[[], StreamParser]]]:
        for output in (*(output for output, _ in self.cases), *self.prose):
            yield output, self.open

    def expected(self) -> Iterator[tuple[str, Callable[[], StreamParser], Sequence[Delta]]]:
        for output, want in self.cases:
            yield output, self.open, want

    def broken(self) -> Iterator[str]:
        """Each case, cut anywhere, and then something that does not belong."""
        for output, _ in self.cases:
            yield from (output[:at] + ODD for at in range(len(output) + 1))

    def test_calls_are_well_formed(self) -> None:
        """Numbered from 0, named once, at first; arguments are always the beginning of an object."""
        for output in (*(output for output, _ in self.cases), *self.broken()):
            parser = self.open()
            arguments: list[str] = []
            for delta in [d for char in output for d in parser.feed(char, ())] + parser.finish():
                if not isinstance(delta, ToolCallDelta):
                    continue
                if delta.index == len(arguments):
                    assert delta.name, f"call {delta.index} of {output!r} begins without a name"
                    arguments.append("")
                else:
                    assert delta.index == len(arguments) - 1, f"call {delta.index} of {output!r}"
                    assert delta.name is None, f"call {delta.index} of {output!r} has two names"
                arguments[-1] += delta.arguments
            for text in arguments:  # if the whole is the beginning of JSON, so is each part
                assert is_json_prefix(text), f"arguments {text!r} are not JSON, from {output!r}"

    def test_text_is_never_lost(self) -> None:
        """Without a call, the text is the output. What follows a broken call is not swallowed."""
        for output in (*self.prose, *self.broken()):
            found = self.parsed(self.open, [output])
            calls = [delta for delta in found if isinstance(delta, ToolCallDelta)]
            if not calls:
                assert collect(found) == output
            elif ODD in output:
                told = collect(found) + "".join(delta.arguments for delta in calls)
                assert ODD in told, f"its end is missing: {output!r} became {found}"

    def test_prose_holds_no_calls(self) -> None:
        for output in self.prose:
            found = self.parsed(self.open, [output])
            assert not any(isinstance(delta, ToolCallDelta) for delta in found), output

    def test_text_streams(self) -> None:
        """Somebody is reading it."""
        parser, told = self.open(), ""
        for at, char in enumerate("The quick brown fox; " * 20, start=1):
            told += collect(parser.feed(char, ()))
            assert at - len(told) <= HELD, f"{at - len(told)} characters are kept back"

    def test_arguments_stream(self) -> None:
        if not self.streams:
            pytest.skip("it hands on whole calls")
        for output, want in self.cases:
            parser = self.open()
            found = [delta for char in output for delta in parser.feed(char, ())]
            for whole in want:
                if not isinstance(whole, ToolCallDelta) or len(whole.arguments) < 16:
                    continue
                mine = [d for d in found if isinstance(d, ToolCallDelta) and d.index == whole.index]
                most = max((len(delta.arguments) for delta in mine), default=0)
                if most > len(whole.arguments) // 2:
                    assert self.late(output, whole), (
                        f"{most} characters of the arguments at once, of {output!r}"
                    )

    def late(self, output: str, whole: ToolCallDelta) -> bool:
        """Whether the name stands behind the arguments, or these are written in another way."""
        before, found, _ = output.partition(whole.arguments)
        return not found or re.search(rf"\b{re.escape(whole.name or '')}\b", before) is None

    def test_a_forced_call_can_be_asked_for(self) -> None:
        """``None`` says that the format cannot be forced; an exception says nothing."""
        name: Mapping[str, Any] = {"type": "function", "function": {"name": self.tools[-1].name}}
        for choice in ("required", name):
            spec = self.open().grammar_for_tool_choice(choice)
            assert spec is None or isinstance(spec, GrammarSpec)

    def test_a_forced_call_parses(self) -> None:
        """Texts drawn from the grammar, by llguidance if that is installed."""
        if "llguidance" not in self.opener.keys("structured_output"):
            pytest.skip("no backend for it is installed")
        from treadle.testing.grammars import sample_texts

        for tool in self.tools:
            choice = {"type": "function", "function": {"name": tool.name}}
            spec = self.open().grammar_for_tool_choice(choice)
            if spec is None:
                pytest.skip("it cannot force a call")
            for output in sample_texts(self.opener, spec, 3):
                found = self.parsed(self.open, [output])
                assert [type(d) for d in found] == [ToolCallDelta], f"{output!r} became {found}"
                for delta in found:
                    assert isinstance(delta, ToolCallDelta) and delta.name == tool.name
                    given = json.loads(delta.arguments)
                    missing = set(tool.parameters.get("required", ())) - given.keys()
                    assert not missing, f"{missing} is missing in {output!r}"


class ReasoningSuite(StreamParserSuite):
    """Reasoning apart from the answer. A case is a prompt, an output, and what becomes of it."""

    cases: ClassVar[Sequence[tuple[str, str, Sequence[Delta]]]] = ()
    prose: ClassVar[Sequence[str]] = PROSE
    tags: ClassVar[Sequence[str]] = ("<think>", "</think>")
    tokenizer: ClassVar[Any] = CodePointTokenizer()

    def open(self, prompt: str) -> ReasoningParser:
        return self.opener.create(
            REASONING_PARSERS, self.key, tokenizer=self.tokenizer, prompt=prompt
        )

    def samples(self) -> Iterator[tuple[str, Callable[[], StreamParser]]]:
        for output, open_, _ in self.expected():
            yield output, open_
        begin, end = self.tags
        for output in (*self.prose, f"{begin}hm{end}yes", f"hm{end}yes", f"{begin}hm"):
            yield output, partial(self.open, "")

    def expected(self) -> Iterator[tuple[str, Callable[[], StreamParser], Sequence[Delta]]]:
        for prompt, output, want in self.cases:
            yield output, partial(self.open, prompt), want

    def test_nothing_is_lost(self) -> None:
        """All that is neither tag nor blank comes out, in order, wherever the output ends."""
        for output, open_ in self.samples():
            for at in range(len(output) + 1):
                broken = output[:at] + ODD
                found = self.parsed(open_, [broken])
                told = "".join(d.text for d in found if not isinstance(d, ToolCallDelta))
                assert self.bare(told) == self.bare(broken), f"{broken!r} became {found}"

    def bare(self, output: str) -> str:
        for tag in self.tags:
            output = output.replace(tag, "")
        return "".join(output.split())

    def test_open_says_where_it_is(self) -> None:
        """A grammar waits until it is closed, and holds from there on."""
        for output, open_ in self.samples():
            parser: Any = open_()
            closed = False
            for char in output:
                before = parser.in_reasoning
                found = parser.feed(char, ())
                if any(isinstance(d, ReasoningDelta) for d in found):
                    assert before or parser.in_reasoning, (
                        f"reasoning while it is closed: {output!r}"
                    )
                if collect(found).strip():
                    assert not parser.in_reasoning, f"an answer while it is open: {output!r}"
                    closed = True
                assert not (closed and parser.in_reasoning), f"opened behind the answer: {output!r}"

    def test_what_opens_it_opens_it(self) -> None:
        """An answer within a grammar may begin with it, and with nothing else."""
        for output, open_ in self.samples():
            parser: Any = open_()
            tag = parser.opening_tag if isinstance(parser, SupportsReasoningOpener) else None
            if tag is not None:
                parser.feed(tag, ())
                assert parser.in_reasoning and parser.opening_tag is None, (
                    f"{tag!r} does not open it"
                )
                other: Any = open_()
                other.feed("x", ())
                assert other.opening_tag is None, f"offered behind the beginning: {output!r}"

    def test_it_streams(self) -> None:
        for output, open_ in self.samples():
            parser, told = open_(), 0
            for at, char in enumerate(output, start=1):
                told += sum(len(getattr(delta, "text", "")) for delta in parser.feed(char, ()))
                tags = sum(len(tag) for tag in self.tags)
                blank = len(output) - len("".join(output.split()))
                assert at - told <= HELD + tags + blank, f"{output[:at]!r} is kept back"
