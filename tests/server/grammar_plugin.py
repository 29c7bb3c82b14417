"""A file with a grammar backend that hangs, crashes and eats memory where its grammar says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from treadle.plugins import PluginManager

PLUGIN = '''
import ctypes, os, sys, threading
from treadle.api import impl
from treadle.api.types import Match

TREADLE = {"structured_output": ["mine", "together", "broken"], "tool_parsers": ["mine"]}

RELEASED = threading.Event()


def misbehave(fault):
    match fault:
        case "hang":
            threading.Event().wait()
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            return bytearray(9 * 2**30)
        case "raise":
            raise ValueError("boom")
        case "wrong":
            return 7
        case "wait":
            RELEASED.wait()
        case "release":
            RELEASED.set()


class Compiler:
    """Allows one text. ``text~place fault index`` fails at a place, at a character of the text."""

    def __init__(self, name, tokenizer, vocab_size):
        assert tokenizer.token_bytes(tokenizer.vocab_size - 1) is not None
        self.name, self.tokenizer = name, tokenizer

    def unsupported_reason(self, spec):
        return None

    def compile(self, spec):
        text, _, fault = spec.source.partition("~")
        place, fault, index = fault.split() if fault else ("", "", "0")
        if place == "compile" and misbehave(fault) == 7:
            return 7
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Grammar(ids, place, fault, int(index))


class Together(Compiler):
    def fill_bitmasks(self, matchers, bitmask, rows):
        for matcher, row in zip(matchers, rows):
            matcher.fill_bitmask(bitmask, row)
        return [matcher.is_accepting for matcher in matchers]

    def accept_tokens(self, matchers, tokens):
        return [
            matcher.is_terminated if matcher.accept_token(token) else None
            for matcher, token in zip(matchers, tokens)
        ]


class Grammar:
    def __init__(self, *arguments):
        self.arguments = arguments

    def matcher(self):
        return Matcher(*self.arguments)


class Matcher:
    def __init__(self, ids, place, fault, index):
        self.ids, self.count = ids, 0
        self.place, self.fault, self.index = place, fault, index
        if place == "matcher":
            misbehave(fault)

    def _at(self, place):
        return misbehave(self.fault) if (place, self.count) == (self.place, self.index) else None

    def fill_bitmask(self, bitmask, row):
        self._at("fill")
        bitmask[row].zero_()
        for token in self.ids[self.count : self.count + 1]:
            bitmask[row, token // 32] = 1 << token % 32 if token % 32 < 31 else -(1 << 31)

    def accept_token(self, token):
        wrong = self._at("accept")
        if self.ids[self.count : self.count + 1] != [token]:
            return False
        self.count += 1
        return wrong or True

    def rollback(self, count):
        self.count -= count

    @property
    def is_accepting(self):
        self._at("accepting")
        return self.count == len(self.ids)

    is_terminated = is_accepting


@impl
def treadle_grammar_compiler(name, tokenizer, vocab_size):
    if name == "broken":
        raise ValueError("it cannot be opened")
    return (Together if name == "together" else Compiler)(name, tokenizer, vocab_size)


@impl
def treadle_tool_parser(name, tokenizer, tools):
    raise ValueError("no parser")


@impl
def treadle_match(kind, key):
    return Match(90, "first")
'''


def write_plugin(folder: Path) -> str:
    """Return the path of the plugin, a module that no other test has imported."""
    path = folder / f"mine_{uuid4().hex}.py"
    path.write_text(PLUGIN)
    return str(path)


def process_of(plugins: PluginManager) -> Any:
    """Return the process of the grammars."""
    plugin: Any = plugins.load("structured_output", "mine")
    return plugin.processes[True]


def close(plugins: PluginManager) -> None:
    """End all processes of the plugin."""
    stand_in: Any = plugins.load("structured_output", "mine")
    for process in stand_in.processes.values():
        process.close()
