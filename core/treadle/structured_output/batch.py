"""The grammars of a step's rows, advanced together where their backend can."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.processes.failure import is_for_process
from treadle.structured_output.state import StructuredOutputState

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

__all__ = ("GrammarRow", "accept_tokens", "fill_bitmasks")

GrammarRow = tuple[int, StructuredOutputState, Collection[int], Collection[int]]
"""A row of the step, its state, its stop token ids and the ids that it must not have next."""

COMMON_WORDS = 32
"""Words in which nearly every mask has a bit: the first ids are those of single characters."""


def fill_bitmasks(rows: Sequence[GrammarRow], bitmask: Tensor, vocab_size: int) -> None:
    """Write the allowed ids of ``rows[i]`` to ``bitmask[i]``, as ``StructuredOutputState`` does.

    ``bitmask`` is int32 ``[at least len(rows), vocab_size // 32 + 1]``.
    """
    batches: dict[Any, list[int]] = {}  # by SupportsGrammarBatches
    for index, row in enumerate(rows):
        batches.setdefault(row[1].batches, []).append(index)
    single = batches.pop(None, [])
    words = bitmask.numpy().view(np.uint32)[: len(rows)]
    for backend, indices in batches.items():
        try:
            matchers = [rows[index][1].matcher for index in indices]
            results = backend.fill_bitmasks(matchers, bitmask, indices)
        except BaseException as error:
            if is_for_process(error):
                raise
            log.warning("%s; each row is filled by itself", error)
            single += indices
            continue
        words[:, -1] &= np.uint32((1 << (vocab_size & 31)) - 1)
        is_common = np.atleast_1d(words[:, :COMMON_WORDS].any(axis=1)).tolist()
        for index, is_accepting in zip(indices, results, strict=True):
            _, state, stop_ids, forbidden_ids = rows[index]
            if is_accepting is None:
                single.append(index)
            elif (
                is_accepting
                or forbidden_ids
                or state.allowed_ids is not None
                or not is_common[index]
            ):
                state.restrict(words[index], is_accepting, stop_ids, forbidden_ids)
    vocab_words = bitmask[:, : -(-vocab_size // 32)]
    for index in single:
        _, state, stop_ids, forbidden_ids = rows[index]
        state.fill_bitmask(vocab_words, index, stop_ids, forbidden_ids)


def accept_tokens(rows: Iterable[tuple[StructuredOutputState, int]]) -> None:
    """The sequences have gained a token each, which is no stop id: set their ``has_ended``."""
    batches: dict[Any, list[tuple[StructuredOutputState, int]]] = {}  # as above
    for row in rows:
        batches.setdefault(row[0].batches, []).append(row)
    for state, token in batches.pop(None, ()):
        state.accept_token(token)
    for backend, batch in batches.items():
        states, tokens = zip(*batch, strict=True)
        try:
            results = backend.accept_tokens([state.matcher for state in states], tokens)
        except BaseException as error:  # nobody knows which of them have advanced
            for state in states:
                state.fail(error)
            continue
        for state, token, must_end in zip(states, tokens, results, strict=True):
            if must_end is None:
                state.accept_token(token)
            elif must_end:
                state.has_ended = True
