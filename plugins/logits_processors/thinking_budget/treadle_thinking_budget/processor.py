"""Lets only the closing tag follow a thought that has reached its budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from treadle.errors import RequestError

__all__ = ("Arguments", "ThinkingBudget", "forced_id")

MAX_LEADING_TOKENS = 8
"""Tokens of blanks that may stand before the tag that opens a thought."""
Ids = Annotated[list[int], Meta(max_length=64)]


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A thought of at most ``max_tokens`` tokens, behind which the ids ``end`` follow.

    It begins behind ``prompt_tokens`` tokens, or behind the id or ids ``begin`` if they come first there. With
    ``begin`` alone, an id, it begins behind the last one, in the prompt or the output. An id of ``stops`` in it, or the first of ``end``, has ended it already.
    """

    max_tokens: Annotated[int, Meta(ge=0)]
    end: Annotated[list[int], Meta(min_length=1, max_length=64)]
    prompt_tokens: Annotated[int, Meta(ge=0)] | None = None
    begin: int | Annotated[list[int], Meta(min_length=1, max_length=64)] | None = None
    stops: Ids = []


class ThinkingBudget:
    """See ``treadle.api.engine.LogitsProcessor``. Keeps no state: the tokens say everything."""

    def validate_params(self, arguments: Any) -> None:
        _parse(arguments)

    def apply(
        self, logits: Tensor, arguments: Sequence[Any], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        for row, (argument, ids) in enumerate(zip(arguments, tokens, strict=True)):
            forced = forced_id(_parse(argument), ids)
            if forced is not None and 0 <= forced < logits.shape[1]:
                logits[row].fill_(-torch.inf)
                logits[row, forced] = 0.0
        return logits


def forced_id(arguments: Arguments, tokens: Sequence[int]) -> int | None:
    """Return the only id that may come next, ``None`` if any may."""
    start = arguments.prompt_tokens or 0
    if arguments.begin is not None:
        is_known = arguments.prompt_tokens is not None
        head = list(tokens[start : start + MAX_LEADING_TOKENS] if is_known else tokens)
        first, *more = [arguments.begin] if isinstance(arguments.begin, int) else arguments.begin
        if first not in head:
            return None
        begin = head.index(first) + 1 if is_known else len(head) - head[::-1].index(first)
        start += begin + len(more)
        if list(tokens[start - len(more) : start]) != more:
            return None
    position = len(tokens) - start - arguments.max_tokens
    if not 0 <= position < len(arguments.end):
        return None
    thought, closing = (
        tokens[start : start + arguments.max_tokens],
        tokens[len(tokens) - position :],
    )
    over = {*arguments.stops, arguments.end[0]}
    if not over.isdisjoint(thought) or list(closing) != arguments.end[:position]:
        return None
    return arguments.end[position]


def _parse(arguments: Any) -> Arguments:
    try:
        return msgspec.convert(arguments, Arguments)
    except msgspec.ValidationError as error:
        raise RequestError(f"thinking_budget: {error}", param="extra_args") from error
