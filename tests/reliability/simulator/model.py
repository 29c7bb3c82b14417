"""The "model": a token is a hash of everything that its sequence may see, read through the pages.

``expected`` generates the same alone, without pages, batches or processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simulator.grammar import Matcher
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import TokenLogprobs

__all__ = (
    "EOS", "VOCAB", "Expected", "SimulatedTokenizer", "cell", "choose", "expected", "logprobs_of",
    "next_hash", "prompt_logprob", "text_of",
)  # fmt: skip

VOCAB = 64
EOS = 63
LETTERS = "abcdefgh"
TEXTS = ["" if i == EOS else LETTERS[i // 8] + LETTERS[i % 8] for i in range(VOCAB)]
IDS = {text: i for i, text in enumerate(TEXTS)}

Cell = int


def cell(token: int, position: int, salt: str | None) -> Cell:
    """What a page keeps of a token."""
    return hash((token, position, zlib.crc32(salt.encode()) if salt else 0))


def next_hash(groups: Sequence[Sequence[Cell]], seed: int) -> int:
    return hash((seed, *map(hash, map(tuple, groups))))


def choose(value: int, allowed: Sequence[int] | None) -> int:
    """The sampled token; ``allowed`` are those of a bitmask."""
    return value % VOCAB if allowed is None else allowed[value % len(allowed)]


def logprobs_of(value: int, token: int, count: int) -> TokenLogprobs:
    others = [(value >> shift) % VOCAB for shift in range(8, 8 + count)]
    values = [-((value >> 20) % 4096) / 1024 - i for i in range(count + 1)]
    return TokenLogprobs([token, *others], values, 1 + (value >> 40) % VOCAB)


def prompt_logprob(before: Cell, token: int) -> TokenLogprobs:
    value = hash((before, token))
    return TokenLogprobs([token], [-(value % 4096) / 1024], 1 + (value >> 40) % VOCAB)


@dataclass
class Expected:
    """What a sequence returns if nothing goes wrong."""

    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    values: list[int]


def expected(
    prompt: Sequence[int],
    params: SamplingParams,
    index: int,
    windows: Sequence[int | None],
    max_model_len: int,
) -> Expected:
    """Generate output ``index`` of a request alone."""
    tokens, values, text, visible = list(prompt), [], "", ""
    seed = 0
    if params.seed is not None:
        seed = (params.seed + index * 0x9E3779B97F4A7C15) & (2**63 - 1)
    cells = [cell(token, position, params.cache_salt) for position, token in enumerate(tokens)]
    limit = min(len(prompt) + (params.max_tokens or max_model_len), max_model_len)
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    matcher = None
    if params.structured_outputs is not None:
        matcher = Matcher(params.structured_outputs.regex or "")
    while True:
        groups = [cells if w is None else cells[max(0, len(cells) - w) :] for w in windows]
        value = next_hash(groups, seed)
        allowed = None if matcher is None else matcher.allowed(stops)
        token = choose(value, allowed)
        values.append(value)
        cells.append(cell(token, len(tokens), params.cache_salt))
        tokens.append(token)
        count = len(tokens) - len(prompt)
        output = tokens[len(prompt) :]
        reason: str | None = None
        stop: int | str | None = None
        if token in stops and count > params.min_tokens:
            reason, stop = "stop", None if token == EOS and not params.ignore_eos else token
        elif matcher is not None and matcher.accept(token):
            reason = "stop"
        elif len(tokens) >= limit:
            reason = "length"
        # The id that stops is part of the ids, but not of the text.
        shown = token not in {EOS, *(params.stop_token_ids or ())} or (
            reason != "stop" or params.include_stop_str_in_output
        )
        piece = TEXTS[token] if shown else ""
        before = len(text)
        text += piece
        if count > params.min_tokens:
            found = _stop_string(visible, piece, params.stop_strings)
            if found is not None:
                end, string = found
                keep = before + end - (0 if params.include_stop_str_in_output else len(string))
                return Expected(output, text[:keep], "stop", string, values)
            visible += piece
        if reason is not None:
            return Expected(output, text, reason, stop, values)


def _stop_string(visible: str, piece: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop string that ends within ``piece``: its end there, and the longest of them."""
    for end in range(1, len(piece) + 1):
        so_far = visible + piece[:end]
        matches = [stop for stop in stops if so_far.endswith(stop)]
        if matches:
            return end, max(matches, key=len)
    return None


def text_of(tokens: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


class _Detokenizer:
    def decode_next(self, token: int) -> str:
        return TEXTS[token]

    def flush(self) -> str:
        return ""


class SimulatedTokenizer:
    """Two letters for a token."""

    vocab_size = VOCAB
    eos_token_id = EOS
    special_token_ids = frozenset({EOS})
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [IDS[text[i : i + 2]] for i in range(0, len(text), 2)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return text_of(ids)

    def id_to_token(self, token: int) -> str:
        return TEXTS[token]

    def token_bytes(self, token: int) -> bytes:
        return TEXTS[token].encode()

    def create_detokenizer(self, prompt_ids: Sequence[int] = (), **_: Any) -> _Detokenizer:
        return _Detokenizer()
