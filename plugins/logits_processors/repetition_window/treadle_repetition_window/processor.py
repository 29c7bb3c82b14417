"""Bans the token that would complete an n-gram which the window already holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from treadle.errors import RequestError

__all__ = ("Arguments", "RepetitionWindow", "banned")


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``ngram`` tokens may not come again within the last ``window`` tokens (0: any distance)."""

    ngram: int = 3
    window: int = 0


class RepetitionWindow:
    """See ``treadle.api.engine.LogitsProcessor``. Keeps no state: the tokens say everything."""

    def validate_params(self, arguments: Any) -> None:
        parsed = _parse(arguments)
        if not 1 <= parsed.ngram <= 64:
            raise RequestError(
                f"repetition_window: ngram is {parsed.ngram}; 1 to 64 is allowed",
                param="extra_args",
            )
        if parsed.window < 0:
            raise RequestError(
                f"repetition_window: window is {parsed.window}; it is 0 (everything) or a number "
                "of tokens",
                param="extra_args",
            )

    def apply(
        self, logits: Tensor, arguments: Sequence[Any], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        for row, (argument, ids) in enumerate(zip(arguments, tokens, strict=True)):
            parsed = _parse(argument)
            banned_ids = banned(ids, parsed.ngram, parsed.window)
            if banned_ids:
                index = torch.tensor(sorted(banned_ids), device=logits.device)
                logits[row].index_fill_(0, index, -torch.inf)
        return logits


def banned(tokens: Sequence[int], ngram: int, window: int) -> set[int]:
    """Ids that would complete an ``ngram`` of the last ``window`` tokens (0: of all)."""
    seen = tokens[-window:] if window else tokens
    if ngram == 1:
        return set(seen)
    tail = tuple(tokens[len(tokens) - ngram + 1 :])
    if len(tail) < ngram - 1:
        return set()
    starts = range(len(seen) - ngram + 1)
    return {seen[i + ngram - 1] for i in starts if tuple(seen[i : i + ngram - 1]) == tail}


def _parse(arguments: Any) -> Arguments:
    try:
        return msgspec.convert(arguments, Arguments)
    except msgspec.ValidationError as error:
        raise RequestError(f"repetition_window: {error}", param="extra_args") from error
