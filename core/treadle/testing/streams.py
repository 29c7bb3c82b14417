"""What the suites of tool parsers and of reasoning parsers have in common."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import pytest

from treadle.api.parsers import Delta, ReasoningDelta, StreamParser, TextDelta, ToolCallDelta
from treadle.plugins import PluginManager
from treadle.testing.matching import Matching

__all__ = (
    "HELD",
    "ODD",
    "PROSE",
    "CodePointTokenizer",
    "StreamParserSuite",
    "collect",
    "merged",
    "split_points",
)

# What a model might say next; in no format does it belong to anything. No letter of it may begin
# or continue an escape, a number or a word of JSON.
ODD = "~ zo~on"
HELD = 64
"""Most characters of plain text that a parser may keep back."""


PROSE = (
    "Hello, how are you?",
    "  blanks around\n\n",
    "a < b, b > a, <b>bold</b>, <tool, </",
    "A list: [1, 2, 3], [see](below), {brackets} and {{double}} ones.",
    '{"answer": 42, "because": ["of", {"the": "question"}]}',
    "def f(x):\n    return {'x': x}[\"x\"]\n",
    "quotes \" and ' and \\ and \\u00e9 and é, 世界, 👩‍👩‍👧",
    "[",
    "{",
    "<",
    " ",
)


class CodePointTokenizer:
    """A tokenizer whose ids are code points."""

    vocab_size = 0x110000
    eos_token_id = 0
    special_token_ids: frozenset[int] = frozenset()
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def id_to_token(self, token: int) -> str:
        return chr(token)


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours joined, so that two streams of the same can be compared."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        match last, delta:
            case TextDelta(a), TextDelta(b):
                found[-1] = TextDelta(a + b)
            case ReasoningDelta(a), ReasoningDelta(b):
                found[-1] = ReasoningDelta(a + b)
            case ToolCallDelta(i, name, a), ToolCallDelta(j, None, b) if i == j:
                found[-1] = ToolCallDelta(i, name, a + b)
            case _:
                found.append(delta)
    return [delta for delta in found if delta not in (TextDelta(""), ReasoningDelta(""))]


def split_points(whole: str) -> Iterator[list[str]]:
    """``whole`` in pieces: character by character, at every place in two, at random."""
    yield list(whole)
    for at in range(1, len(whole)):
        yield [whole[:at], whole[at:]]
    draw = random.Random(whole)
    for _ in range(12):
        places = sorted(draw.sample(range(len(whole) + 1), min(len(whole), draw.randrange(2, 9))))
        yield [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


def collect(deltas: Sequence[Delta]) -> str:
    """The text of ``deltas``, without calls and reasoning."""
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


class StreamParserSuite(Matching):
    """What both kinds of parsers promise."""

    lengths: ClassVar[tuple[int, int]] = (1000, 4000)
    """Of the texts whose times are compared; the second is four times the first."""

    def samples(self) -> Iterator[tuple[str, Callable[[], StreamParser]]]:
        """Outputs, and what opens a parser for each."""
        raise NotImplementedError

    def expected(self) -> Iterator[tuple[str, Callable[[], StreamParser], Sequence[Delta]]]:
        raise NotImplementedError

    @cached_property
    def opener(self) -> PluginManager:
        return self.host()

    def parsed(self, open_: Callable[[], StreamParser], pieces: Sequence[str]) -> list[Delta]:
        parser = open_()
        found = [delta for piece in pieces for delta in parser.feed(piece, ())]
        return merged([*found, *parser.finish()])

    def test_cases(self) -> None:
        count = 0
        for output, open_, want in self.expected():
            assert self.parsed(open_, [output]) == list(want), f"of {output!r}"
            count += 1
        if not count:
            pytest.skip("it was given no cases")

    def test_any_chunking_gives_the_same(self) -> None:
        for output, open_ in self.samples():
            want = self.parsed(open_, [output])
            for pieces in split_points(output):
                assert self.parsed(open_, pieces) == want, f"cut as {pieces!r}"

    def test_two_parsers_share_nothing(self) -> None:
        """Many responses are parsed at the same time."""
        for output, open_ in self.samples():
            want = self.parsed(open_, list(output))
            first, second = open_(), open_()
            found: tuple[list[Delta], list[Delta]] = ([], [])
            for char in output:
                found[0].extend(first.feed(char, ()))
                found[1].extend(second.feed(char, ()))
            for one, parser in zip(found, (first, second), strict=True):
                one.extend(parser.finish())
                assert merged(one) == want, f"of {output!r}, twice at the same time"

    def test_every_prefix_can_be_finished(self) -> None:
        for output, open_ in self.samples():
            for at in range(len(output) + 1):
                try:
                    self.parsed(open_, [output[:at]])
                except Exception as error:
                    pytest.fail(f"{type(error).__name__} at the end of {output[:at]!r}: {error}")

    def test_the_end_is_said_once(self) -> None:
        for output, open_ in self.samples():
            for at in (len(output) // 2, len(output)):
                parser = open_()
                parser.feed(output[:at], ())
                parser.finish()
                assert merged(parser.finish()) == [], f"finish() repeats itself after {output!r}"

    def test_time_is_linear(self) -> None:
        """A model may write anything, and its text is parsed beside everybody else's."""
        shapes = ["a", "{", "[", "<", '"', "\\", " ", "\n", "(", '{"name": "', '{"a": [', "f(a="]
        outputs = [output for output, _ in self.samples()][:6]
        _, open_ = next(iter(self.samples()))
        shapes += outputs + [output[: len(output) // 2] for output in outputs]
        for shape in shapes:
            if not shape:
                continue
            short, long = (
                min(self.seconds(open_, (shape * n)[:n]) for _ in range(2)) for n in self.lengths
            )
            # Four times the text; something quadratic takes sixteen times as long.
            assert long < 9 * short + 0.01, f"{shape!r}: {short:.4f} s, four times of it {long:.4f}"

    def seconds(self, open_: Callable[[], StreamParser], output: str) -> float:
        parser = open_()
        start = time.thread_time()
        for char in output:
            parser.feed(char, ())
        parser.finish()
        return time.thread_time() - start
