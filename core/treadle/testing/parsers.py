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
    SupportsSpecialTags,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolParser,
)
from treadle.api.structured_output import GrammarSpec
from treadle.testing.json_prefix import is_json_prefix
from treadle.testing.streams import (
    FOREIGN_TEXT,
    MAX_PENDING_CHARS,
    PROSE,
    CodePointTokenizer,
    StreamParserSuite,
    collect,
    merge_adjacent,
)

__all__ = ("ReasoningSuite", "ToolParserSuite", "call", "merge_adjacent", "reasoning", "text")

MANY_CALLS = 5
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


def text(content: str) -> TextDelta:
    return TextDelta(content)


def call(index: int, name: str, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(index, name, arguments)


def reasoning(content: str) -> ReasoningDelta:
    return ReasoningDelta(content)


def tags_of(parser: object) -> Sequence[str]:
    return parser.special_tags if isinstance(parser, SupportsSpecialTags) else ()


class ToolParserSuite(StreamParserSuite):
    """Checks that calls are found and that other text stays unchanged.

    ``streams`` is whether arguments are emitted before a call is complete; ``prose`` has no calls.
    ``malformed`` are calls that are none: text as a whole. ``block`` is what stands before, between
    and behind the calls of one output, and ``sound`` is a call of the function ``f``.
    """

    cases: ClassVar[Sequence[tuple[str, Sequence[Delta]]]] = ()
    prose: ClassVar[Sequence[str]] = PROSE
    tools: ClassVar[Sequence[Tool]] = TOOLS
    tokenizer: ClassVar[Any] = CodePointTokenizer()
    streams: ClassVar[bool] = True
    malformed: ClassVar[Sequence[str]] = ()
    block: ClassVar[tuple[str, str, str]] = ("", "", "")
    sound: ClassVar[str] = ""

    def open(self) -> ToolParser:
        return self.opener.create(
            TOOL_PARSERS, self.key, tokenizer=self.tokenizer, tools=self.tools
        )

    def samples(self) -> Iterator[tuple[str, Callable[[], StreamParser]]]:
        for output in (*(output for output, _ in self.cases), *self.prose):
            yield output, self.open

    def expected(self) -> Iterator[tuple[str, Callable[[], StreamParser], Sequence[Delta]]]:
        for output, deltas in self.cases:
            yield output, self.open, deltas

    def broken(self) -> Iterator[str]:
        """Each case, cut anywhere, and then something that does not belong."""
        for output, _ in self.cases:
            yield from (output[:end] + FOREIGN_TEXT for end in range(len(output) + 1))

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
        """Without a call, all but the tags is text. What follows a broken call is not swallowed."""
        for output in (*self.prose, *self.broken()):
            deltas = self.parse(self.open, [output])
            calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
            if not calls:
                assert collect(deltas) == self.without_tags(output)
            elif FOREIGN_TEXT in output:
                emitted = collect(deltas) + "".join(delta.arguments for delta in calls)
                assert FOREIGN_TEXT in emitted, f"its end is missing: {output!r} became {deltas}"

    def without_tags(self, output: str) -> str:
        for tag in tags_of(self.open()):
            output = output.replace(tag, "")
        return output

    def test_no_tag_is_text(self) -> None:
        """Tags are for the parser, whether a call becomes of them or not."""
        for output in (*(output for output, _ in self.cases), *self.broken()):
            content = collect(self.parse(self.open, [output]))
            for tag in tags_of(self.open()):
                assert tag not in content, f"{tag!r} is left of {output!r}"

    def test_a_malformed_call_is_text(self) -> None:
        """As a whole: never half a call."""
        if not self.malformed:
            pytest.skip("it was given no malformed calls")
        begin, _, end = self.block
        for item in self.malformed:
            output = f"{begin}{item}{end}"
            expected = [text(content)] if (content := self.without_tags(output)) else []
            assert self.parse(self.open, [output]) == expected, f"of {output!r}"

    def test_a_malformed_call_spares_its_siblings(self) -> None:
        if not (self.malformed and self.sound):
            pytest.skip("it was given no malformed calls, or no sound one")
        begin, separator, end = self.block
        for item in self.malformed:
            output = begin + separator.join((self.sound, item, self.sound)) + end
            deltas = self.parse(self.open, [output])
            calls = [d for d in deltas if isinstance(d, ToolCallDelta)]
            assert [d.name for d in calls] == ["f", "f"], f"{output!r} became {deltas}"
            assert self.without_tags(item).strip() in collect(deltas), f"lost of {output!r}"

    def test_each_of_many_calls_is_found(self) -> None:
        """A model may ask for everything at once; what is right for two calls may not be for five."""
        if not self.sound:
            pytest.skip("it was given no sound call")
        begin, separator, end = self.block
        output = begin + separator.join([self.sound] * MANY_CALLS) + end
        for pieces in ([output], list(output)):
            deltas = self.parse(self.open, pieces)
            found = [(d.index, d.name) for d in deltas if isinstance(d, ToolCallDelta)]
            assert found == [(i, "f") for i in range(MANY_CALLS)], f"{output!r} became {deltas}"

    def test_prose_holds_no_calls(self) -> None:
        for output in self.prose:
            deltas = self.parse(self.open, [output])
            assert not any(isinstance(delta, ToolCallDelta) for delta in deltas), output

    def test_text_streams(self) -> None:
        """Somebody is reading it."""
        parser, emitted = self.open(), ""
        for num_chars, char in enumerate("The quick brown fox; " * 20, start=1):
            emitted += collect(parser.feed(char, ()))
            assert num_chars - len(emitted) <= MAX_PENDING_CHARS, (
                f"{num_chars - len(emitted)} characters are kept back"
            )

    def test_arguments_stream(self) -> None:
        if not self.streams:
            pytest.skip("it hands on whole calls")
        for output, expected in self.cases:
            parser = self.open()
            deltas = [delta for char in output for delta in parser.feed(char, ())]
            for expected_call in expected:
                if (
                    not isinstance(expected_call, ToolCallDelta)
                    or len(expected_call.arguments) < 16
                ):
                    continue
                call_deltas = [
                    d
                    for d in deltas
                    if isinstance(d, ToolCallDelta) and d.index == expected_call.index
                ]
                max_len = max((len(delta.arguments) for delta in call_deltas), default=0)
                if max_len > len(expected_call.arguments) // 2:
                    assert self._allows_late_arguments(output, expected_call), (
                        f"{max_len} characters of the arguments at once, of {output!r}"
                    )

    def _allows_late_arguments(self, output: str, expected: ToolCallDelta) -> bool:
        """Whether the name follows the arguments, or the format writes these in another way."""
        prefix, separator, _ = output.partition(expected.arguments)
        return not separator or re.search(rf"\b{re.escape(expected.name or '')}\b", prefix) is None

    def test_a_forced_call_can_be_asked_for(self) -> None:
        """``None`` means that the format cannot be forced; an exception is an error."""
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
            endings = sorted(set(re.findall("</[^>]+>", spec.source.replace("\\/", "/"))))
            for output in sample_texts(self.opener, spec, 3, endings=endings):
                deltas = self.parse(self.open, [output])
                assert [type(d) for d in deltas] == [ToolCallDelta], f"{output!r} became {deltas}"
                for delta in deltas:
                    assert isinstance(delta, ToolCallDelta) and delta.name == tool.name
                    arguments = json.loads(delta.arguments)
                    missing = set(tool.parameters.get("required", ())) - arguments.keys()
                    assert not missing, f"{missing} is missing in {output!r}"


class ReasoningSuite(StreamParserSuite):
    """Reasoning apart from the answer. A case is a prompt, an output, and what becomes of it.

    ``call_openers`` are tags that begin a tool call, which ends a thought that is still open.
    """

    cases: ClassVar[Sequence[tuple[str, str, Sequence[Delta]]]] = ()
    prose: ClassVar[Sequence[str]] = PROSE
    tags: ClassVar[Sequence[str]] = ("<think>", "</think>")
    call_openers: ClassVar[Sequence[str]] = ("<tool_call>",)
    tokenizer: ClassVar[Any] = CodePointTokenizer()

    def open(self, prompt: str) -> ReasoningParser:
        return self.opener.create(
            REASONING_PARSERS, self.key, tokenizer=self.tokenizer, prompt=prompt
        )

    def samples(self) -> Iterator[tuple[str, Callable[[], StreamParser]]]:
        for output, open_, _ in self.expected():
            yield output, open_
        begin, end = self.tags
        for output in (
            *self.prose,
            f"{begin}hm{end}yes",
            f"{begin}hm{end}yes{end}no",
            f"hm{end}yes",
            f"{begin}hm",
        ):
            yield output, partial(self.open, "")

    def expected(self) -> Iterator[tuple[str, Callable[[], StreamParser], Sequence[Delta]]]:
        for prompt, output, deltas in self.cases:
            yield output, partial(self.open, prompt), deltas

    def test_nothing_is_lost(self) -> None:
        """All that is neither tag nor blank comes out, in order, wherever the output ends."""
        for output, open_ in self.samples():
            for end in range(len(output) + 1):
                broken = output[:end] + FOREIGN_TEXT
                deltas = self.parse(open_, [broken])
                emitted = "".join(d.text for d in deltas if not isinstance(d, ToolCallDelta))
                assert self.bare(emitted) == self.bare(broken), f"{broken!r} became {deltas}"

    def test_no_tag_is_left(self) -> None:
        """Also not one that closes what nobody opened."""
        for output, open_ in self.samples():
            for delta in self.parse(open_, [output]):
                for tag in tags_of(open_()):
                    assert tag not in getattr(delta, "text", ""), f"{tag!r} is left of {output!r}"

    def test_a_call_ends_an_open_thought(self) -> None:
        """A model that calls a tool while it thinks has thought enough."""
        for opener in self.call_openers:
            output = f"{self.tags[0]}hm\n{opener}\n{{}}"
            deltas = self.parse(partial(self.open, ""), [output])
            assert opener in collect(deltas), f"{output!r} became {deltas}"

    def bare(self, output: str) -> str:
        for tag in self.tags:
            output = output.replace(tag, "")
        return "".join(output.split())

    def test_open_says_where_it_is(self) -> None:
        """A grammar waits until it is closed, and holds from there on."""
        for output, open_ in self.samples():
            parser: Any = open_()
            is_closed = False
            for char in output:
                was_open = parser.in_reasoning
                deltas = parser.feed(char, ())
                if any(isinstance(d, ReasoningDelta) for d in deltas):
                    assert was_open or parser.in_reasoning, (
                        f"reasoning while it is closed: {output!r}"
                    )
                if collect(deltas).strip():
                    assert not parser.in_reasoning, f"an answer while it is open: {output!r}"
                    is_closed = True
                assert not (is_closed and parser.in_reasoning), (
                    f"opened behind the answer: {output!r}"
                )

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
            parser, num_emitted = open_(), 0
            for num_chars, char in enumerate(output, start=1):
                num_emitted += sum(
                    len(getattr(delta, "text", "")) for delta in parser.feed(char, ())
                )
                tags = sum(len(tag) for tag in self.tags)
                blank = len(output) - len("".join(output.split()))
                assert num_chars - num_emitted <= MAX_PENDING_CHARS + tags + blank, (
                    f"{output[:num_chars]!r} is kept back"
                )
