"""Grammars compiled by outlines-core: a regex becomes an automaton over the bytes of all tokens."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

from treadle.api.types import CompiledGrammar, GrammarSpec, Tokenizer
from treadle_outlines.schema_support import refusal
from treadle_structured_output_kit.bitmask import (
    BitmaskRow,
    empty_row,
    forbid_token,
    write_row,
)
from treadle_structured_output_kit.dialect import normalize_patterns
from treadle_structured_output_kit.drafts import map_children
from treadle_structured_output_kit.formats import dates_as_patterns
from treadle_structured_output_kit.json_schema import ASSERTIONS
from treadle_structured_output_kit.regex import choice_regex
from treadle_structured_output_kit.vocabulary import text_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from treadle_structured_output_kit.llguidance import LLGuidanceCompiler

__all__ = ("Compiler",)

MAX_ROLLBACK = 1024
NAMES_NOTHING = frozenset({"properties", "additionalProperties"})
KINDS = frozenset({"regex", "choice", "json_object", "ebnf", "structural_tag"})
START = b"\0"


class Compiler:
    """Safe in threads: what changes is only that llguidance is set up when it is first needed."""

    name = "outlines"

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        strict: bool,
        whitespace_pattern: str,
        max_recursion_depth: int,
    ) -> None:
        self._strict = strict
        self._whitespace = whitespace_pattern
        self._depth = max_recursion_depth
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._grammars: LLGuidanceCompiler | None = None
        self._lock = threading.Lock()
        ids_by_bytes: dict[bytes, list[int]] = {}
        for token, data in text_tokens(tokenizer, vocab_size).items():
            ids_by_bytes.setdefault(data, []).append(token)
        # Start and end get ids of their own behind the vocabulary. The ids that really end a sequence
        # are the core's affair, and any of the model's may be an ordinary token.
        ids_by_bytes.setdefault(START, []).append(vocab_size + 1)
        self._vocabulary = Vocabulary(vocab_size, ids_by_bytes)

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        match spec.kind:
            case "json_schema":
                is_strict = self._strict and spec.options.get("strict", True)
                return refusal(_schema(spec)) if is_strict else None
            case kind if kind in KINDS:
                return None
            case kind:
                return f"grammars of the kind {kind} are not supported"

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        spec = normalize_patterns(spec)
        whitespace = spec.options.get("whitespace_pattern")
        match spec.kind:
            case "json_schema":
                schema = json.dumps(_schema(spec), ensure_ascii=False)
                source = build_regex_from_schema(
                    schema, whitespace or self._whitespace, self._depth
                )
                # The library's own patterns of formats take any digit of Unicode.
                return self._index(re.sub(r"\\(.)", _ascii_digit, source))
            case "regex":
                return self._index(spec.source)
            case "choice":
                return self._index(choice_regex(json.loads(spec.source)))
            case "json_object":  # as a regex it is bounded in depth, and takes seconds
                options = {"whitespace_pattern": whitespace} if whitespace else {}
                return self._llguidance().compile_json_schema({"type": "object"}, **options)
            case "structural_tag":
                from treadle_structured_output_kit.structural_tag_lark import structural_tag_lark

                lenient = not (self._strict and spec.options.get("strict", True))
                lark = structural_tag_lark(
                    spec.source, self._tokenizer, self._vocab_size, lenient=lenient
                )
                return self._llguidance().compile_grammar(lark)
            case _:
                return self._llguidance().compile_grammar(spec.source)

    def _index(self, pattern: str) -> _Grammar:
        # The library builds the automaton of a search too, for which a match may begin anywhere.
        # With strings in strings it doubles with every character; with a first character that
        # comes nowhere else it does not.
        return _Grammar(Index(rf"\x00(?:{pattern})", self._vocabulary), self._vocab_size)

    def _llguidance(self) -> LLGuidanceCompiler:
        from treadle_structured_output_kit.llguidance import LLGuidanceCompiler

        with self._lock:
            if self._grammars is None:
                self._grammars = LLGuidanceCompiler(self._tokenizer, self._vocab_size)
            return self._grammars


class _Grammar:
    def __init__(self, index: Index, vocab_size: int) -> None:
        self._index = index
        self._vocab_size = vocab_size

    def matcher(self) -> _Matcher:
        guide = Guide(self._index, MAX_ROLLBACK)
        guide.advance(self._vocab_size + 1, return_tokens=False)
        return _Matcher(guide, self._vocab_size)


class _Matcher:
    def __init__(self, guide: Guide, vocab_size: int) -> None:
        self._guide = guide
        self._vocab_size = vocab_size
        self._row = empty_row(vocab_size + 2)
        self._filled = False

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        write_row(bitmask, row, self._mask())

    def accept_token(self, token: int) -> bool:
        if token >= self._vocab_size:
            return False
        try:
            self._guide.advance(token, return_tokens=False)
        except ValueError:
            return False
        self._filled = False
        return True

    def rollback(self, count: int) -> None:
        self._guide.rollback_state(count)
        self._filled = False

    @property
    def is_accepting(self) -> bool:
        return bool(self._guide.is_finished())

    @property
    def is_terminated(self) -> bool:
        return self.is_accepting and not self._mask().any()

    def _mask(self) -> BitmaskRow:
        allowed = self._row
        if not self._filled:
            self._guide.write_mask_into(allowed.ctypes.data, len(allowed), allowed.itemsize)
            for token_id in (self._vocab_size, self._vocab_size + 1):
                forbid_token(allowed, token_id)
            self._filled = True
        return allowed


def _schema(spec: GrammarSpec) -> Any:
    """The schema as the library gets it: its own dates have 30 days in February, it writes any value
    as alternatives without brackets around them, so that one would stand for all that is around it, and
    no member where no property is named."""
    return _changed(dates_as_patterns(json.loads(normalize_patterns(spec).source)))


def _changed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("additionalProperties", True) is True and not schema.get("required"):
        silent = {"additionalProperties"} if schema.get("properties") else NAMES_NOTHING
        schema = {name: value for name, value in schema.items() if name not in silent}
    if not ASSERTIONS & schema.keys():
        return {**schema, "anyOf": [{}]}
    return map_children(schema, _changed)


def _ascii_digit(escape: re.Match[str]) -> str:
    return "[0-9]" if escape[1] == "d" else escape[0]
