"""Parsers of one output: pieces, failures, special tokens, and where they run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from treadle.api.kinds import TOOL_PARSERS
from treadle.api.parsers import Delta, TextDelta
from treadle.config import PluginConfig
from treadle.outputs import TextPart
from treadle.plugins import Entry, PluginManager
from treadle.plugins.boundary import wrap
from treadle.plugins.call_stats import PluginCallStats
from treadle.plugins.guard import PluginGuard
from treadle.processes.watchdog import PluginThreads
from treadle.text.chat import run_inline
from treadle.text.output_parser import GuardedParser, OutputParser
from treadle.text.parser_plugins import ParserPlugins
from treadle.text.special_tokens import SpecialTokenFilter


def guarded(parser: Any, *, inline: bool = True) -> GuardedParser:
    """A parser behind its boundary; ``inline`` is what is expected before its class is known."""
    entry = Entry("tool_parsers", "p", "p", "p", "1")
    runs_inline = getattr(type(parser), "inline", inline)
    behind = wrap(parser, PluginGuard(entry, TOOL_PARSERS, PluginCallStats()))
    return GuardedParser("p", lambda: (behind, runs_inline), inline=inline)


def test_text_that_a_broken_parser_had_taken_is_not_lost() -> None:
    class Holding:
        """Keeps the last character back, as a parser does that waits for a marker."""

        def __init__(self, good: int) -> None:
            self.good, self.pending = good, ""

        def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
            self.good -= 1
            if self.good < 0:
                raise ValueError
            output, self.pending = (self.pending + text)[:-1], text[-1]
            return [TextDelta(output)]

        def finish(self) -> list[Delta]:
            raise ValueError

    for good in range(4):
        parser = OutputParser(None, guarded(Holding(good)))
        parts = [
            part
            for text in ("ab", "cd", "ef")
            for part in run_inline(parser.parse(text, (), last=text == "ef"))
        ]
        assert "".join(p.text for p in parts if isinstance(p, TextPart)) == "abcdef"
        assert parser.failure == ["p"]


SPECIAL = "\ue004"


class Marked:
    """A tokenizer of characters, one of which is the special token ``<|turn|>``."""

    special_token_ids = frozenset({ord(SPECIAL)})

    def id_to_token(self, token: int) -> str:
        return "<|turn|>" if chr(token) == SPECIAL else chr(token)


def test_a_text_may_come_after_its_id() -> None:
    """A stop string that begins like it holds it back."""
    mark = ord("\ue004")
    for pieces in (
        [("a", [97, mark]), ("<|tu", []), ("rn|>b", [98])],
        [("a<|", [97, mark]), ("turn|>b", [98])],
        [("a<|turn|>b", [97, mark, 98])],
    ):
        special = SpecialTokenFilter(Marked(), Marked.special_token_ids)
        output = "".join(special.feed(text, ids) for text, ids in pieces)
        assert output + special.finish() == "ab"
    special = SpecialTokenFilter(Marked(), Marked.special_token_ids)
    assert special.feed("<|turn|><|tu", [1, 2, 3]) == "<|turn|><|tu"
    assert special.feed("x<|tu", [mark]) + special.finish() == "x<|tu"  # it never came


class Echo:
    """Returns all text, and remembers the threads that called it."""

    def __init__(self, threads: list[int]) -> None:
        self.threads = threads

    def feed(self, text: str, ids: Sequence[int]) -> list[Delta]:
        self.threads.append(threading.get_ident())
        return [TextDelta(text)]

    def finish(self) -> list[Delta]:
        return []


class InlineEcho(Echo):
    inline = True


class WatchedEcho(Echo):
    inline = False


@pytest.mark.parametrize(
    ("kind", "default", "inline"),
    [
        (Echo, True, [True, True]),
        (Echo, False, [False, False]),
        # The class has its say once it is known, which is after the first call.
        (InlineEcho, False, [False, True]),
        (WatchedEcho, True, [True, False]),
    ],
)
async def test_where_a_parser_runs(kind: type[Echo], default: bool, inline: list[bool]) -> None:
    threads: list[int] = []
    watchdog = PluginThreads(1.0)
    watched = guarded(kind(threads), inline=default)
    parser = OutputParser(None, watched, watchdog=watchdog)
    parts = [*await parser.parse("a", (), last=False), *await parser.parse("b", (), last=True)]
    watchdog.close()
    assert parts == [TextPart("a"), TextPart("b")]
    assert [thread == threading.get_ident() for thread in threads] == inline


def test_treadles_own_parsers_run_inline_and_others_do_not(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text('TREADLE = {"tool_parsers": ["mine"]}\n')
    plugin_manager = PluginManager(PluginConfig(plugin_file=[str(file)]))
    for key, inline in (("hermes", True), ("mine", False), ("nobody", False)):
        plugins = ParserPlugins(
            plugin_manager, None, {"tool_call_parser": key, "reasoning_parser": None}
        )
        assert plugins._is_inline(TOOL_PARSERS, key) is inline
