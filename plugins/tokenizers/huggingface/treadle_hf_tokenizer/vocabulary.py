"""What each token id stands for, in bytes.

A tokenizer's *decoder* says how the texts of tokens become the text of a sequence. Two families
cover nearly every language model, and in both a token is a fixed run of bytes: byte-level BPE,
where each character of a token stands for one byte, and the SentencePiece family, where ``▁`` is a
space and ``<0xE6>`` a byte. For these, incremental detokenisation is an incremental UTF-8 decoder:
linear, exact, and it never splits a character. Other vocabularies have no ``Alphabet``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ("Alphabet", "ByteTable", "alphabet")


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes are themselves, the rest follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    remaining = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(remaining)
    }


BYTE_OF_CHAR: Mapping[str, int] = _byte_of_char()


@dataclass(frozen=True, slots=True)
class Alphabet:
    """How the text of a token becomes bytes.

    ``space`` is the character that stands for a space (``""``: none). ``opening`` says what the
    decoder drops from the very first token of a text: nothing, one space, or every ``space``.
    """

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    opening: str = "keep"  # keep, strip or erase

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([BYTE_OF_CHAR[c] for c in token])
            except KeyError:  # an added token: its text is itself
                return token.encode("utf-8", "replace")
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes((byte,))
        if self.space:
            token = token.replace(self.space, " ")
        return token.encode("utf-8", "replace")

    def first_bytes_of(self, token: str) -> bytes:
        """The bytes of a token that opens a text."""
        if self.opening == "erase":
            return self.bytes_of(token.replace(self.space, ""))
        data = self.bytes_of(token)
        return data[1:] if self.opening == "strip" and data.startswith(b" ") else data


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


class ByteTable(dict[int, bytes]):
    """``table[id]`` is what the id stands for; filled as ids are asked for. ``b""`` for unknown ids."""

    def __init__(self, letters: Alphabet, text_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._letters = letters
        self._text_of = text_of

    def __missing__(self, token: int) -> bytes:
        text = self._text_of(token)
        data = b"" if text is None else self._letters.bytes_of(text)
        # Two threads may both compute an entry: they write the same value.
        self[token] = data
        return data

    def first(self, token: int) -> bytes:
        """What ``token`` stands for where it opens a text."""
        text = self._text_of(token)
        return b"" if text is None else self._letters.first_bytes_of(text)


def alphabet(decoder: Any) -> Alphabet | None:
    """The alphabet of a ``tokenizers`` decoder; ``None`` if its tokens are not fixed runs of bytes."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return Alphabet(byte_level=True)
    if types == ["Metaspace"]:
        is_never = steps[0].get("prepend_scheme") == "never"
        return Alphabet(space=steps[0]["replacement"], opening="keep" if is_never else "erase")
    return _pieces(steps)


def _pieces(steps: list[dict[str, Any]]) -> Alphabet | None:
    """``Replace`` then perhaps ``ByteFallback``, ``Fuse`` and ``Strip``, as SentencePiece models have."""
    space, fallback, fused, opening = "", False, False, "keep"
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(char)}, "content": " "} if (
                len(char) == 1 and not space and not fused
            ):
                space = char
            case {"type": "ByteFallback"} if not fused:
                fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                opening = "strip" if start else opening
            case _:
                return None
    if not space and not fallback:
        return None
    return Alphabet(space=space, byte_fallback=fallback, opening=opening)
