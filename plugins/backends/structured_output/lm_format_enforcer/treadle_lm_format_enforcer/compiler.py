"""lm-format-enforcer behind the contract of treadle: its parsers, driven by bytes of tokens.

The library's own ``TokenEnforcer`` keeps every prefix of every sequence, and loses tokens that are
parts of a character; its parsers are taken without it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lmformatenforcer import CharacterLevelParser, JsonSchemaParser, RegexParser
from lmformatenforcer.characterlevelparser import (
    CharacterLevelParserConfig,
    StringParser,
    UnionParser,
)
from lmformatenforcer.external.jsonschemaobject import JsonSchemaObject

from treadle.api.types import GrammarSpec, Tokenizer
from treadle_lm_format_enforcer.schema_rewrite import Unenforceable, rewrite_schema
from treadle_lm_format_enforcer.state import Reader, State
from treadle_lm_format_enforcer.syntax import START
from treadle_lm_format_enforcer.vocabulary import Vocabulary
from treadle_structured_output_kit.bitmask import BitmaskRow, write_row
from treadle_structured_output_kit.dialect import normalize_patterns

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("Compiler",)


class Compiler:
    """Immutable, safe in threads."""

    name = "lm-format-enforcer"

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        strict: bool,
        max_whitespace: int,
        max_array_length: int,
    ) -> None:
        self._strict = strict
        self._whitespace = max_whitespace
        self._items = max_array_length
        self._vocabulary = Vocabulary(tokenizer, vocab_size)

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        if spec.kind not in ("json_schema", "json_object", "regex", "choice"):
            return f"grammars of the kind {spec.kind} are not supported"
        if "whitespace_pattern" in spec.options:
            return "whitespace_pattern is not supported"
        if spec.kind == "json_schema":
            try:
                rewrite_schema(json.loads(spec.source), strict=self._is_strict(spec))
            except Unenforceable as error:
                return str(error)
        return None

    def _is_strict(self, spec: GrammarSpec) -> bool:
        return self._strict and spec.options.get("strict", True) is not False

    def compile(self, spec: GrammarSpec) -> _Grammar:
        spec = normalize_patterns(spec)
        schema: dict[str, Any] | None = None
        if spec.kind in ("json_schema", "json_object"):
            source = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.source)
            schema = rewrite_schema(source, strict=self._is_strict(spec))
        try:
            grammar = _Grammar(self._vocabulary, spec, schema, self._config(spec))
            grammar.check()
        except Exception as error:  # the library's often have no text
            raise ValueError(f"{type(error).__name__} {error}".strip()) from error
        return grammar

    def _config(self, spec: GrammarSpec) -> CharacterLevelParserConfig:
        extra_characters = {c for c in spec.source if c >= " "} - set(self._vocabulary.alphabet)
        return CharacterLevelParserConfig(
            alphabet=self._vocabulary.alphabet + "".join(sorted(extra_characters)),
            max_consecutive_whitespaces=self._whitespace,
            force_json_field_order=False,
            max_json_array_length=self._items,
        )


class _Grammar:
    """The library's JSON parsers share a mutable context, so every matcher gets its own parser."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        spec: GrammarSpec,
        schema: dict[str, Any] | None,
        config: CharacterLevelParserConfig,
    ) -> None:
        self._vocabulary = vocabulary
        self._schema = schema
        self._config = config
        self._lines: dict[Any, BitmaskRow] = {}
        self._patterns: dict[str, RegexParser] = {}
        self._parser: CharacterLevelParser | None = None
        if spec.kind == "regex":
            self._parser = _without_dead_ends(RegexParser(spec.source, config))
        elif spec.kind == "choice":
            self._parser = UnionParser([StringParser(text) for text in json.loads(spec.source)])

    def check(self) -> None:
        """Find out what is wrong with the patterns of a schema: parsers make theirs when they come
        to them, in the middle of an output."""
        for pattern in _patterns(self._schema):
            pattern = pattern.removeprefix("^").removesuffix("$")
            _without_dead_ends(RegexParser(pattern, self._config))

    def matcher(self) -> _Matcher:
        if self._parser is not None:
            first = State(self._parser)
        else:
            first = State(self._json_parser(), START)
        return _Matcher(Reader(self._vocabulary, self._lines), first)

    def _json_parser(self) -> JsonSchemaParser:
        """A parser whose automata of patterns belong to this grammar: the library's own context keeps
        them for the process, and mixes the alphabets of grammars."""
        context = JsonSchemaParser._Context()
        any_object = JsonSchemaParser.ANY_JSON_OBJECT_SCHEMA
        context.model_class = JsonSchemaObject(**self._schema) if self._schema else any_object
        context.alphabet_without_quotes = self._config.alphabet.replace('"', "")
        context.regex_parser_cache = self._patterns
        parser = JsonSchemaParser(context, self._config)
        context.active_parser = parser
        return parser


class _Matcher:
    def __init__(self, reader: Reader, first: State) -> None:
        self._reader = reader
        self._states = [first]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        write_row(bitmask, row, self._reader.mask(self._states[-1]))

    def accept_token(self, token: int) -> bool:
        next_state = self._reader.next_state(self._states[-1], token)
        if next_state is None:
            return False
        self._states.append(next_state)
        return True

    def rollback(self, count: int) -> None:
        if count >= len(self._states):
            raise ValueError(f"cannot undo {count} of {len(self._states) - 1} tokens")
        if count:
            del self._states[-count:]

    @property
    def is_accepting(self) -> bool:
        return self._states[-1].is_accepting

    @property
    def is_terminated(self) -> bool:
        return self.is_accepting and not self._reader.mask(self._states[-1]).any()


def _without_dead_ends(parser: RegexParser) -> RegexParser:
    """Take out the characters after which no text can match: look-around leaves such states, and
    the library allows everything in them. Raises ``ValueError`` if no text matches at all."""
    fsm = parser.context.pattern
    sources: dict[int, set[int]] = {}
    for state, targets in fsm.map.items():
        for target in targets.values():
            sources.setdefault(target, set()).add(state)
    alive, pending = set(fsm.finals), list(fsm.finals)
    while pending:
        new_states = sources.get(pending.pop(), set()) - alive
        alive |= new_states
        pending += new_states
    if fsm.initial not in alive:
        raise ValueError("no text matches the pattern")
    for targets in fsm.map.values():
        for symbol in [symbol for symbol, target in targets.items() if target not in alive]:
            del targets[symbol]
    return parser


def _patterns(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [pattern for value in schema for pattern in _patterns(value)]
    if not isinstance(schema, dict):
        return []
    patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    return patterns + [pattern for value in schema.values() for pattern in _patterns(value)]
