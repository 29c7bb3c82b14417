"""The tokens of a vocabulary as a tree of characters, with what ends in the middle of one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from treadle.api.types import Tokenizer
from treadle_structured_output_kit.bitmask import BitmaskRow, row_of
from treadle_structured_output_kit.vocabulary import text_tokens

__all__ = ("Node", "Vocabulary", "split")

# Characters that the library may write where a schema lets it write any, beside those that are in
# tokens: printable ASCII, and letters of Latin, Greek and Cyrillic.
ALPHABET = frozenset(map(chr, (*range(0x20, 0x7F), *range(0xA1, 0x180), *range(0x370, 0x500))))
PLAIN = '"\\'


class Node:
    """``children`` by character; the ``tokens`` that end here; the ``tails`` of those that end in
    the middle of the next character, with their ids."""

    __slots__ = ("children", "tails", "tokens")

    def __init__(self) -> None:
        self.children: dict[str, Node] = {}
        self.tokens: list[int] = []
        self.tails: list[tuple[bytes, int]] = []

    def descend(self, text: str) -> Node:
        """The node behind ``text``, made if need be."""
        node = self
        for char in text:
            node = node.children.setdefault(char, Node())
        return node


class Vocabulary:
    """Immutable but for caches that threads may fill twice."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.root = Node()
        self.texts: dict[int, bytes] = {}
        self.continuation_tokens: list[tuple[bytes, int]] = []
        """Tokens that begin in the middle of a character."""
        token_bytes = text_tokens(tokenizer, vocab_size)
        # Half a character is a promise that the other half can be written.
        has_all_continuations = all(
            bytes((b,)) in set(token_bytes.values()) for b in range(0x80, 0xC0)
        )
        characters: set[str] = set()
        for token, data in token_bytes.items():
            if data[0] & 0xC0 == 0x80:
                if has_all_continuations:
                    self.continuation_tokens.append((data, token))
                    self.texts[token] = data
                continue
            parts = split(data)
            if parts is None or (parts[1] and not has_all_continuations):
                continue
            self.texts[token] = data
            characters.update(parts[0])
            node = self.root.descend(parts[0])
            if parts[1]:
                node.tails.append((parts[1], token))
            else:
                node.tokens.append(token)
        self.alphabet = "".join(sorted({c for c in characters if c >= " "} | ALPHABET))
        self._char_sets: dict[str, frozenset[str]] = {}
        self._prefixes: dict[str, frozenset[bytes]] = {}
        self._string_masks: dict[tuple[int, int, bool], BitmaskRow] = {}

    def char_set(self, characters: str) -> frozenset[str]:
        """The characters of a text; the same few texts come again and again."""
        char_set = self._char_sets.get(characters)
        if char_set is None:
            if len(self._char_sets) >= 512:
                self._char_sets.clear()
            char_set = self._char_sets[characters] = frozenset(characters)
        return char_set

    def prefixes(self, characters: str) -> frozenset[bytes]:
        """Every proper beginning of the bytes of one of ``characters``."""
        prefixes = self._prefixes.get(characters)
        if prefixes is None:
            if len(self._prefixes) >= 64:
                self._prefixes.clear()
            coded = [c.encode() for c in self.char_set(characters) if c >= "\x80"]
            prefixes = frozenset(data[:n] for data in coded for n in range(1, len(data)))
            self._prefixes[characters] = prefixes
        return prefixes

    def string_mask(self, min_length: int, max_length: int, *, start: bool) -> BitmaskRow:
        """A mask of the tokens that may stand inside of a JSON string: at most ``max_length`` characters,
        and with a quote at the end at least ``min_length``. ``start`` leaves out those that begin with
        a space. Tokens with a quote or backslash elsewhere are not among them."""
        lengths = self._lengths
        min_length, max_length = (
            min(min_length, lengths[-1][0] + 1),
            min(max_length, lengths[-1][0]),
        )
        key = (min_length, max_length, start)
        if key not in self._string_masks:
            token_ids = (
                token
                for length, quoted, spaced, token in lengths
                if length <= max_length
                and not (start and spaced)
                and not (quoted and length < min_length)
            )
            if len(self._string_masks) >= 1024:
                self._string_masks.clear()
            self._string_masks[key] = self.bitmask_row(token_ids)
        return self._string_masks[key]

    def bitmask_row(self, tokens: Iterable[int]) -> BitmaskRow:
        """A row of a bitmask."""
        return row_of(tokens, self.vocab_size)

    @cached_property
    def _lengths(self) -> list[tuple[int, bool, bool, int]]:
        """``(characters, ends with a quote, begins with a space, token)`` by length."""
        prefixes = self.prefixes(self.alphabet)
        entries = []
        for token, data in self.texts.items():
            parts = split(data)
            if parts is None or data[0] & 0xC0 == 0x80:
                continue
            text, tail = parts
            quoted = text.endswith('"') and not tail
            text = text[:-1] if quoted else text
            if any(c in PLAIN or c < " " for c in text) or (tail and tail not in prefixes):
                continue
            entries.append((len(text) + bool(tail), quoted, text.startswith(" "), token))
        return sorted(entries)


def split(data: bytes) -> tuple[str, bytes] | None:
    """Whole characters, and the beginning of one at the end; ``None`` if it is no UTF-8."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None
        return data[: error.start].decode(), data[error.start :]
