"""Log probabilities in the three shapes that the API has.

JSON has no infinities: what is not finite becomes ``FLOOR``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.api.files import Tokenizer
from treadle.outputs import Logprob, PositionLogprobs
from treadle_server.wire.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from treadle_server.wire.common import WireLogprob
from treadle_server.wire.completions import CompletionLogprobs

__all__ = ("FLOOR", "TextLogprobs", "chat_logprobs", "finite", "prompt_logprobs")

FLOOR = -9999.0


def finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR


def likeliest(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` likeliest entries, best first."""
    return sorted(position.items(), key=lambda item: -finite(item[1].logprob))[:count]


def text_of(token: int, entry: Logprob | None, tokenizer: Tokenizer) -> str:
    if entry is not None and entry.decoded_token is not None:
        return entry.decoded_token
    return tokenizer.id_to_token(token)


def chat_logprobs(
    ids: Sequence[int], positions: Sequence[PositionLogprobs], top: int, tokenizer: Tokenizer
) -> ChatLogprobs:
    """``choices[].logprobs`` of a chat completion."""

    def describe(token: int, entry: Logprob | None) -> tuple[str, float, list[int] | None]:
        logprob = finite(entry.logprob) if entry is not None else FLOOR
        return text_of(token, entry, tokenizer), logprob, list(tokenizer.token_bytes(token))

    content = []
    for token, position in zip(ids, positions, strict=False):
        text, logprob, raw = describe(token, position.get(token))
        alternatives = []
        for other_token, entry in likeliest(position, top):
            t, p, b = describe(other_token, entry)
            alternatives.append(TopLogprob(token=t, logprob=p, bytes=b))
        content.append(
            ChatTokenLogprob(token=text, logprob=logprob, bytes=raw, top_logprobs=alternatives)
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[dict[int, WireLogprob] | None] | None:
    """``prompt_logprobs`` as vLLM writes them: a dict by id for each token but the first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            token: WireLogprob(
                logprob=finite(entry.logprob), rank=entry.rank, decoded_token=entry.decoded_token
            )
            for token, entry in position.items()
        }
        for position in positions
    ]


class TextLogprobs:
    """``choices[].logprobs`` of a text completion; keeps the offset between chunks."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top_logprobs = top
        self._offset = 0

    def take(
        self, ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        """Entries for the next tokens of the text. ``None`` stands for the first prompt token."""
        out = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token, position in zip(ids, positions, strict=False):
            entry = position.get(token) if position is not None else None
            text = text_of(token, entry, self._tokenizer)
            out.text_offset.append(self._offset)
            out.tokens.append(text)
            out.token_logprobs.append(finite(entry.logprob) if entry is not None else None)
            out.top_logprobs.append(self._alternatives(token, position))
            self._offset += len(text)
        return out

    def _alternatives(
        self, token: int, position: PositionLogprobs | None
    ) -> dict[str, float] | None:
        """Return log probabilities by text, as the API defines them.

        If several ids have the same text, the likeliest keeps it; the others become ``token_id:N``.
        """
        if position is None:
            return None
        entries = dict(likeliest(position, self._num_top_logprobs))
        if token in position:
            entries.setdefault(token, position[token])
        result: dict[str, float] = {}
        for other_token, entry in entries.items():
            text = text_of(other_token, entry, self._tokenizer)
            result[f"token_id:{other_token}" if text in result else text] = finite(entry.logprob)
        return result
