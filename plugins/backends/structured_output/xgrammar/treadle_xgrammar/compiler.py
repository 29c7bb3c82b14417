"""Grammars compiled by xgrammar, and their matchers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from treadle.api.types import CompiledGrammar, GrammarMatcher, GrammarSpec, Tokenizer
from treadle_structured_output_kit.bitmask import empty_row, forbid_token, write_row
from treadle_structured_output_kit.dialect import normalize_patterns
from treadle_structured_output_kit.regex import choice_regex
from treadle_structured_output_kit.structural_tag import parse_structural_tag, schemas_in
from treadle_structured_output_kit.vocabulary import text_tokens
from treadle_xgrammar.support import prepared, refusal, tag_refusal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("Compiler",)

KINDS = frozenset({"json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"})
MISSING = "its library is not installed here: pip install 'xgrammar>=0.2.8,<0.3'"
MAX_THREADS = 8
MANY_ROWS = 4
"""From how many rows on threads share them. A mask takes some 0.1 ms, and waking threads takes as long."""


class Compiler:
    """A ``GrammarCompiler``. Immutable, safe in threads."""

    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, strict: bool) -> None:
        self._tokenizer, self._vocab_size, self._strict = tokenizer, vocab_size, strict
        # Here, and not when it is first needed: that would be in a fork, whose limits are for grammars.
        self._library: Any = _library(tokenizer, vocab_size) if find_spec("xgrammar") else None

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        """Return why ``spec`` cannot be enforced, or ``None``."""
        if self._library is None:
            return MISSING
        if spec.kind not in KINDS:
            return f"grammars of the kind {spec.kind} are not supported"
        if spec.options.get("whitespace_pattern", "") != "":
            return "whitespace_pattern is not supported"
        if spec.kind == "ebnf" and "::=" not in spec.source:
            return "grammars in Lark are not supported; write GBNF, whose rules have ::="
        is_strict = self._strict and spec.options.get("strict", True) is not False
        if spec.kind == "json_schema" and is_strict:
            return refusal(json.loads(spec.source))
        if spec.kind == "structural_tag":
            tag = parse_structural_tag(spec.source)
            for source in schemas_in(tag) if is_strict else ():
                if reason := refusal(json.loads(source)):
                    return reason
            return tag_refusal(spec.source, self._tokenizer)
        return None

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``. Raises ``RuntimeError`` with the library's message."""
        spec, library = normalize_patterns(spec), self._library
        match spec.kind:
            case "json_schema" | "json_object":
                schema = json.loads(spec.source) if spec.kind == "json_schema" else {}
                compact = spec.options.get("whitespace_pattern") == ""
                grammar = library.compile_json_schema(
                    json.dumps(
                        {"type": "object"} if spec.kind == "json_object" else prepared(schema)
                    ),
                    any_whitespace=not compact,
                    separators=(",", ":") if compact else None,
                    strict_mode=False,
                )
            case "regex":
                grammar = library.compile_regex(spec.source)
            case "choice":
                grammar = library.compile_regex(choice_regex(json.loads(spec.source)))
            case "structural_tag":
                grammar = library.compile_structural_tag(_tag(spec.source))
            case _:
                grammar = library.compile_grammar(spec.source)
        return _Grammar(grammar, self._vocab_size)

    def fill_bitmasks(
        self, matchers: Sequence[GrammarMatcher], bitmask: Tensor, rows: Sequence[int]
    ) -> list[bool | None]:
        """Do what ``SupportsGrammarBatches`` says."""
        libraries = _libraries(matchers)
        if len(libraries) < MANY_ROWS:
            for library, row in zip(libraries, rows, strict=True):
                library.fill_next_token_bitmask(bitmask, row)
        else:
            self._threads.batch_fill_next_token_bitmask(libraries, bitmask, list(rows))
        return [library.is_completed() for library in libraries]

    def accept_tokens(
        self, matchers: Sequence[GrammarMatcher], tokens: Sequence[int]
    ) -> list[bool | None]:
        """Do what ``SupportsGrammarBatches`` says. A token takes some 3 us, which needs no threads."""
        return [
            matcher.is_terminated if matcher.accept_token(token) else None
            for matcher, token in zip(matchers, tokens, strict=True)
        ]

    @cached_property
    def _threads(self) -> Any:
        """The threads for many rows, made with the first: forks, which compile, have none."""
        from xgrammar import BatchGrammarMatcher

        return BatchGrammarMatcher(min(MAX_THREADS, os.cpu_count() or 1))


def _libraries(matchers: Sequence[GrammarMatcher]) -> list[Any]:
    return [matcher.library for matcher in matchers if isinstance(matcher, _Matcher)]


def _library(tokenizer: Tokenizer, vocab_size: int) -> Any:
    """Return the library's compiler. The end gets an id of its own behind the vocabulary, and what is no
    text has no bytes."""
    with kept_handler(signal.SIGSEGV):
        from xgrammar import GrammarCompiler, TokenizerInfo

    words = [b""] * vocab_size + [b"</s>"]
    for token, data in text_tokens(tokenizer, vocab_size).items():
        words[token] = data
    info = TokenizerInfo(words, vocab_size=vocab_size + 1, stop_token_ids=[vocab_size])
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


@contextlib.contextmanager
def kept_handler(number: int) -> Iterator[None]:
    """Keep the handler of a signal, for which the library has its own: Python's names the line that crashes."""
    libc, saved = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # a sigaction, and room
    libc.sigaction(number, None, saved)
    try:
        yield
    finally:
        libc.sigaction(number, saved, None)


class _Grammar:
    def __init__(self, grammar: Any, vocab_size: int) -> None:
        self._grammar, self._vocab_size = grammar, vocab_size

    def matcher(self) -> _Matcher:
        from xgrammar import GrammarMatcher

        return _Matcher(GrammarMatcher(self._grammar), self._vocab_size)


class _Matcher:
    """A ``GrammarMatcher``: the library's, whose end is the id behind the vocabulary."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        import torch

        self.library, self._vocab_size = matcher, vocab_size
        self._row = empty_row(vocab_size + 1)
        self._tensor = torch.from_numpy(self._row.view("int32")).unsqueeze(0)

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        self._fill()
        forbid_token(self._row, self._vocab_size)
        write_row(bitmask, row, self._row)

    def accept_token(self, token: int) -> bool:
        return bool(token != self._vocab_size and self.library.accept_token(token))

    def rollback(self, count: int) -> None:
        self.library.rollback(count)

    @property
    def is_accepting(self) -> bool:
        return bool(self.library.is_completed())

    @property
    def is_terminated(self) -> bool:
        if not self.is_accepting:
            return False
        self._fill()
        forbid_token(self._row, self._vocab_size)
        return not self._row.any()

    def _fill(self) -> None:
        if not self.library.fill_next_token_bitmask(self._tensor, 0):
            self._row.fill(0xFFFFFFFF)
        extra = -(self._vocab_size + 1) % 32  # bits of no id, which the library may set
        self._row[-1] &= 0xFFFFFFFF >> extra


def _tag(source: str) -> Any:
    document = json.loads(source)
    if "format" in document:
        return json.dumps({"type": "structural_tag", **document})
    tags = [
        {
            "type": "tag",
            "begin": item["begin"],
            "content": {"type": "json_schema", "json_schema": item["schema"]},
            "end": item["end"],
        }
        for item in document["structures"]
    ]
    form = {"type": "triggered_tags", "triggers": document["triggers"], "tags": tags}
    return json.dumps({"type": "structural_tag", "format": form})
