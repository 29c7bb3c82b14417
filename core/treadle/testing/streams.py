"""The common part of the suites of tool parsers and of reasoning parsers."""

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
    "FOREIGN_TEXT",
    "MAX_PENDING_CHARS",
    "PROSE",
    "CodePointTokenizer",
    "StreamParserSuite",
    "collect",
    "merge_adjacent",
    "split_points",
)

# Text that is not part of any format. None of its letters may begin or continue an escape, a number
# or a word of JSON.
FOREIGN_TEXT = "~ zo~on"
MAX_PENDING_CHARS = 64
"""Maximum number of characters of plain text that a parser may hold as pending text."""

FAMILY = "👩‍👩‍👧"
"""Characters that UTF-16 writes as pairs of halves."""

PROSE = (
    "Hello, how are you?",
    "  blanks around\n\n",
    "a < b, b > a, <b>bold</b>, <tool, </",
    "A list: [1, 2, 3], [see](below), {brackets} and {{double}} ones.",
    '{"answer": 42, "because": ["of", {"the": "question"}]}',
    "def f(x):\n    return {'x': x}[\"x\"]\n",
    f"quotes \" and ' and \\ and \\u00e9 and é, 世界, {FAMILY}",
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


def merge_adjacent(deltas: Sequence[Delta]) -> list[Delta]:
    """Return ``deltas`` with adjacent ones of the same kind merged, so that two streams compare equal."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        match last, delta:
            case TextDelta(a), TextDelta(b):
                result[-1] = TextDelta(a + b)
            case ReasoningDelta(a), ReasoningDelta(b):
                result[-1] = ReasoningDelta(a + b)
            case ToolCallDelta(i, name, a), ToolCallDelta(j, None, b) if i == j:
                result[-1] = ToolCallDelta(i, name, a + b)
            case _:
                result.append(delta)
    return [delta for delta in result if delta not in (TextDelta(""), ReasoningDelta(""))]


def split_points(text: str) -> Iterator[list[str]]:
    """``text`` in pieces: character by character, at every place in two, at random."""
    yield list(text)
    for cut in range(1, len(text)):
        yield [text[:cut], text[cut:]]
    draw = random.Random(text)
    for _ in range(12):
        cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(2, 9))))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def collect(deltas: Sequence[Delta]) -> str:
    """Return the text of ``deltas``, without calls and reasoning."""
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


class StreamParserSuite(Matching):
    """The checks of both kinds of parsers."""

    lengths: ClassVar[tuple[int, int]] = (1000, 4000)
    """Lengths of the texts of which the times are compared; the second is four times the first."""

    def samples(self) -> Iterator[tuple[str, Callable[[], StreamParser]]]:
        """Yield outputs, each with a function that creates a parser for it."""
        raise NotImplementedError

    def expected(self) -> Iterator[tuple[str, Callable[[], StreamParser], Sequence[Delta]]]:
        raise NotImplementedError

    @cached_property
    def opener(self) -> PluginManager:
        return self.plugin_manager()

    def parse(self, open_: Callable[[], StreamParser], pieces: Sequence[str]) -> list[Delta]:
        parser = open_()
        deltas = [delta for piece in pieces for delta in parser.feed(piece, ())]
        return merge_adjacent([*deltas, *parser.finish()])

    def test_cases(self) -> None:
        count = 0
        for output, open_, expected in self.expected():
            assert self.parse(open_, [output]) == list(expected), f"of {output!r}"
            count += 1
        if not count:
            pytest.skip("the suite has no cases")

    def test_any_chunking_gives_the_same(self) -> None:
        for output, open_ in self.samples():
            expected = self.parse(open_, [output])
            for pieces in split_points(output):
                assert self.parse(open_, pieces) == expected, f"cut as {pieces!r}"

    def test_two_parsers_share_nothing(self) -> None:
        """Many responses are parsed at the same time."""
        for output, open_ in self.samples():
            expected = self.parse(open_, list(output))
            first, second = open_(), open_()
            results: tuple[list[Delta], list[Delta]] = ([], [])
            for char in output:
                results[0].extend(first.feed(char, ()))
                results[1].extend(second.feed(char, ()))
            for deltas, parser in zip(results, (first, second), strict=True):
                deltas.extend(parser.finish())
                assert merge_adjacent(deltas) == expected, f"of {output!r}, twice at the same time"

    def test_every_prefix_can_be_finished(self) -> None:
        for output, open_ in self.samples():
            for end in range(len(output) + 1):
                try:
                    self.parse(open_, [output[:end]])
                except (Exception, SystemExit) as error:
                    pytest.fail(f"{type(error).__name__} at the end of {output[:end]!r}: {error}")

    def test_what_it_returns_can_be_sent(self) -> None:
        """The host refuses other types than deltas, of texts and whole numbers, and half characters."""
        kind = self.opener.kinds[self.kind]
        for output, open_ in self.samples():
            parser = self.opener.guarded(kind, self.key, open_())
            for char in f"{output}{FAMILY}":
                parser.feed(char, ())
            parser.finish()

    def test_the_end_is_said_once(self) -> None:
        for output, open_ in self.samples():
            for end in (len(output) // 2, len(output)):
                parser = open_()
                parser.feed(output[:end], ())
                parser.finish()
                assert merge_adjacent(parser.finish()) == [], (
                    f"finish() repeats itself after {output!r}"
                )

    def test_time_is_linear(self) -> None:
        """A model may write anything, and one slow parse would delay all other requests."""
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
        for pos in range(0, len(output), 4):
            parser.feed(output[pos : pos + 4], ())
        parser.finish()
        return time.thread_time() - start
