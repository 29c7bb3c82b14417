"""A small vocabulary with everything that makes masks hard."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.api.files import IncrementalDetokenizer

__all__ = ("SmallTokenizer",)

# Tokens that cross the parts of a JSON text, halves of characters, and ordinary pieces.
PIECES = (
    *('{"', '"}', '": ', '", "', '":', '",', "[]", "{}", "}}", ']}', '"}]', '":"', ': "', ', "', "\\n"),
    *("true", "false", "null", "tr", "ue", "nul", "12", "00", "0.", "-1", "1e", "e5", "2024", "-0"),
    *("a", "ab", "abc", "bb", " a", "name", "yes", "yes sir", "no", "\n  ", "    ", "  ", "\t", "x1"),
    *("é", "ü", "日", "日本", "😀", "a日"),
)  # fmt: skip
HALVES = (
    b"\xc3",
    b"\xe6\x97",
    b"\x97\xa5",
    b"\xa5a",
    b"\xf0\x9f",
    b"\x98\x80",
    b"a\xc3",
    b"\xbc\xc3",
)
SPECIAL = ("<end>", "<begin>", "<tool>", "")


class SmallTokenizer:
    """Ids 0 to 255 are bytes, in an order of their own; then pieces, halves and special tokens."""

    chat_template: str | None = None

    def __init__(self) -> None:
        rotated = [bytes([(byte + 100) % 256]) for byte in range(256)]
        pieces = [piece.encode() for piece in PIECES]
        self._tokens = [*rotated, *pieces, *HALVES, *(name.encode() for name in SPECIAL)]
        self._special = frozenset(range(len(self._tokens) - len(SPECIAL), len(self._tokens)))

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def eos_token_id(self) -> int:
        return min(self._special)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special

    def of_byte(self, byte: int) -> int:
        return (byte - 100) % 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.of_byte(byte) for byte in text.encode()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def id_to_token(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._tokens[token] if token < len(self._tokens) else b""

    def create_detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        raise NotImplementedError("grammars need no stream")
