"""llguidance's own encoder for a vocabulary of byte pairs: its threads use it without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llguidance import LLTokenizer

__all__ = ("byte_pair_tokenizer",)

# How the families of tokenizers divide a text before they merge bytes.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS, _SIGNS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORDS = rf"{_CONTRACTION}|{_BEFORE}\p{{L}}+"
_CASED = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
_CASED_CONTRACTION = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
)
PATTERNS = (
    "|".join((_WORDS, r"\p{N}", _SIGNS, _SPACES)),  # Qwen
    "|".join((_WORDS, r"\p{N}{1,3}", _SIGNS, _SPACES)),  # Llama 3, cl100k
    "|".join((_CASED_CONTRACTION, r"\p{N}{1,3}", _SIGNS_OR_SLASH, _SPACES)),  # o200k, gpt-oss
    "|".join((_CASED, r"\p{N}", _SIGNS_OR_SLASH, _SPACES)),  # Mistral's Tekken
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
)
PROBES = (
    '{"name": "value", "first_name":"x","is_valid": true, "items": [1, 22, 333, 4444, 12345678.5e-10]}',
    "You're, I'LL, we've, don't; camelCase HTTPServer XMLHttpRequest iPhone McDonald",
    "a  b   c\td\n\n\te\r\n  f \n g\u00a0h //path/to/file.txt #tag @user $5.00 (x)[y]{z}<a>b</a>\n",
    "naïve Ünïcode Ελληνικά русский язык 中文字符 日本語テキスト 한국어 العربية हिन्दी 👩‍👩‍👧 e\u0301 ǅ ٣٤٥",
    '":","":{"}]}],["\\n\\u00e9\\"',
    "function_call temperature 2021-02-29T12:34:56Z https://example.com/a?b=c&d=%20",
)
"""Texts that are divided differently by each pattern."""
MAX_TOKEN = 64
_library: Any = LLTokenizer  # its annotations lack ``from_tiktoken``


def byte_pair_tokenizer(
    tokens: Sequence[bytes], special: Iterable[int], encode: Callable[[str], list[int]]
) -> LLTokenizer | None:
    """Return a tokenizer that encodes as ``encode`` does, or ``None`` if none is known to.

    ``tokens`` are the bytes of every id, the last of which ends a sequence; the ids in ``special`` are no
    text. A vocabulary of byte pairs merges the pair whose token has the lowest id first.
    """
    end, kept = len(tokens) - 1, {*special, len(tokens) - 1}
    ordinary = {data: i for i, data in enumerate(tokens) if i not in kept}
    names = {tokens[i].decode("utf-8", "replace"): i for i in kept}
    if len(ordinary) + len(names) != len(tokens):
        return None  # two ids have the same bytes
    if any(bytes([byte]) not in ordinary for byte in range(256)):
        return None
    pattern = _pattern(ordinary, encode)
    if pattern is None:
        return None
    made: LLTokenizer = _library.from_tiktoken(
        encoder=ordinary, special_tokens=names, pattern=pattern, eos_token=end, n_vocab=len(tokens)
    )
    return made


def _pattern(ordinary: Mapping[bytes, int], encode: Callable[[str], list[int]]) -> str | None:
    """Return the pattern with which all probes are encoded as by ``encode``."""
    expected = [encode(text) for text in PROBES]
    # What can come out of the probes: a tokenizer of some hundred tokens is made in no time.
    parts = {bytes([byte]) for byte in range(256)}
    for data in (text.encode() for text in PROBES):
        ends = range(1, MAX_TOKEN + 1)
        parts |= {data[i : i + size] for i in range(len(data)) for size in ends} & ordinary.keys()
    ids = sorted(map(ordinary.__getitem__, parts))
    renumbered = {data: ids.index(ordinary[data]) for data in parts}
    for pattern in PATTERNS:
        small = _library.from_tiktoken(
            encoder=renumbered,
            special_tokens={"<[end]>": len(ids)},
            pattern=pattern,
            eos_token=len(ids),
            n_vocab=len(ids) + 1,
        )
        if [[ids[i] for i in small.tokenize_str(text)] for text in PROBES] == expected:
            return pattern
    return None
