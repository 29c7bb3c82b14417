"""Where one sequence is, and which tokens may follow."""

from __future__ import annotations

from typing import Any

from lmformatenforcer import CharacterLevelParser

from treadle_lm_format_enforcer.syntax import Syntax
from treadle_lm_format_enforcer.vocabulary import Node, Vocabulary, split
from treadle_structured_output_kit.bitmask import BitmaskRow

__all__ = ("MAX_ROW_BYTES", "Reader", "State")

MAX_ROW_BYTES = 4 << 20
"""What the rows that the states of a grammar share may take; the grammar's size does not count them."""


class State:
    """Immutable: a parser, the syntax beside it, and the bytes of an unfinished character."""

    __slots__ = ("bitmask_row", "parser", "pending", "syntax")

    def __init__(
        self, parser: CharacterLevelParser, syntax: Syntax | None = None, pending: bytes = b""
    ) -> None:
        self.parser = parser
        self.syntax = syntax
        self.pending = pending
        self.bitmask_row: BitmaskRow | None = None

    @property
    def is_accepting(self) -> bool:
        if self.pending or (self.syntax is not None and not self.syntax.done):
            return False
        return bool(self.parser.can_end())

    def step(self, char: str, allowed: frozenset[str]) -> State | None:
        """After one character; ``allowed`` are those that the parser takes."""
        if char not in allowed:
            return None
        syntax = self.syntax
        if syntax is not None:
            syntax = syntax.step(char)
            if syntax is None:
                return None
        return State(self.parser.add_character(char), syntax)


class Reader:
    """Reads tokens in states. ``lines`` are masks that states of one grammar share."""

    def __init__(self, vocabulary: Vocabulary, lines: dict[Any, BitmaskRow]) -> None:
        self._vocabulary = vocabulary
        self._lines = lines

    def next_state(self, state: State, token: int) -> State | None:
        """After a token, ``None`` if it is not allowed."""
        data = self._vocabulary.texts.get(token)
        if data is None:
            return None
        if not state.pending and not self.mask(state)[token >> 5] >> (token & 31) & 1:
            return None
        return self._read(state, data)

    def mask(self, state: State) -> BitmaskRow:
        """The tokens that may follow, as a row of a bitmask. Not to be written to."""
        if state.bitmask_row is None:
            key = None if state.pending else state.parser.cache_key()
            if key is None:
                state.bitmask_row = self._compute_row(state)
            else:
                row = self._lines.get(key)
                if row is None:
                    row = self._compute_row(state)
                    if len(self._lines) * row.nbytes > MAX_ROW_BYTES:
                        self._lines.clear()
                    self._lines[key] = row
                state.bitmask_row = row
        return state.bitmask_row

    def _compute_row(self, state: State) -> BitmaskRow:
        vocabulary, tokens = self._vocabulary, list[int]()
        if state.pending:
            tokens = [
                token
                for data, token in vocabulary.continuation_tokens
                if self._read(state, data) is not None
            ]
            return vocabulary.bitmask_row(tokens)
        free = state.parser.shortcut_key()
        if isinstance(free, tuple) and state.syntax is not None and state.syntax.in_string:
            _, length, min_length, max_length = free
            row = vocabulary.string_mask(
                min_length - length, max_length - length, start=state.syntax.mode == "s"
            )
            self._walk(state, vocabulary.root, tokens, characters_only='"\\')
            return row | vocabulary.bitmask_row(tokens)
        self._walk(state, vocabulary.root, tokens)
        return vocabulary.bitmask_row(tokens)

    def _walk(
        self, state: State, node: Node, matches: list[int], characters_only: str = ""
    ) -> None:
        """Collect the tokens below ``node`` that the state allows."""
        if not characters_only:
            matches += node.tokens
        characters: str = state.parser.get_allowed_characters()
        allowed = self._vocabulary.char_set(characters)
        if node.tails and not characters_only:
            prefixes = self._vocabulary.prefixes(characters)
            matches += [token for tail, token in node.tails if tail in prefixes]
        for char in characters_only or node.children.keys() & allowed:
            child = node.children.get(char)
            if child is not None and (next_state := state.step(char, allowed)) is not None:
                self._walk(next_state, child, matches)

    def _read(self, state: State, data: bytes) -> State | None:
        parts = split(state.pending + data)
        if parts is None:
            return None
        text, tail = parts
        for char in text:
            allowed = self._vocabulary.char_set(state.parser.get_allowed_characters())
            next_state = state.step(char, allowed)
            if next_state is None:
                return None
            state = next_state
        if not tail:
            return state
        if tail not in self._vocabulary.prefixes(state.parser.get_allowed_characters()):
            return None
        return State(state.parser, state.syntax, tail)
