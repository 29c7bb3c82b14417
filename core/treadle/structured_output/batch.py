"""The grammars of a step's rows, advanced together where their backend can."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.processes.failure import is_for_process
from treadle.structured_output.state import StructuredOutputState

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

__all__ = ("GrammarBatch", "GrammarRow")

GrammarRow = tuple[int, StructuredOutputState, Collection[int], Collection[int]]
"""A row of the step, its state, its stop token ids and the ids that it must not have next."""

COMMON_WORDS = 16
"""Words in which nearly every mask has a bit: the first ids are those of single characters."""


class GrammarBatch:
    """The constrained rows of a step, by the backends that advance them together.

    ``sequences`` are all of the step, if their next step has the same rows and may use the same batch.
    """

    def __init__(self, rows: Sequence[GrammarRow], sequences: Sequence[object] = ()) -> None:
        self.rows = rows
        batches: dict[Any, list[int]] = {}  # by SupportsGrammarBatches
        for index, row in enumerate(rows):
            batches.setdefault(row[1].batches, []).append(index)
        self._single = batches.pop(None, [])
        self.backends = list(batches)
        states = ((b, [rows[i][1] for i in indices], indices) for b, indices in batches.items())
        self._batches = [(b, own, [s.matcher for s in own], indices) for b, own, indices in states]
        self._restricted = any(row[3] or row[1].allowed_ids is not None for row in rows)
        self.sequences = () if self._single or self._restricted else sequences
        self.stop_ids = frozenset[int]().union(*(row[2] for row in rows))

    def fill_bitmasks(self, bitmask: Tensor, vocab_size: int) -> None:
        """Write the allowed ids of ``rows[i]`` to ``bitmask[i]``, as ``StructuredOutputState`` does.

        ``bitmask`` is int32 ``[at least len(rows), vocab_size // 32 + 1]``.
        """
        rows, single = self.rows, list(self._single)
        words = bitmask.numpy().view(np.uint32)[: len(rows)]
        for backend, _, matchers, indices in self._batches:
            try:
                results = backend.fill_bitmasks(matchers, bitmask, indices)
            except BaseException as error:
                if is_for_process(error):
                    raise
                log.warning("%s; each row is filled by itself", error)
                single += indices
                continue
            is_common = np.atleast_1d(words[:, :COMMON_WORDS].any(axis=1))
            if not self._restricted and set(results) == {False} and is_common.all():
                continue
            words[:, -1] &= np.uint32((1 << (vocab_size & 31)) - 1)
            for index, is_accepting in zip(indices, results, strict=True):
                _, state, stop_ids, forbidden = rows[index]
                if is_accepting is None:
                    single.append(index)
                elif is_accepting or forbidden or self._restricted or not is_common[index]:
                    state.restrict(words[index], is_accepting, stop_ids, forbidden)
        vocab_words = bitmask[:, : -(-vocab_size // 32)]
        for index in single:
            _, state, stop_ids, forbidden = rows[index]
            state.fill_bitmask(vocab_words, index, stop_ids, forbidden)

    def accept_tokens(self, tokens: Sequence[int]) -> None:
        """``rows[i]`` has gained ``tokens[i]``, which is no stop id: set the ``has_ended`` of its state."""
        for index in self._single:
            self.rows[index][1].accept_token(tokens[index])
        for backend, states, matchers, indices in self._batches:
            own = [tokens[i] for i in indices]
            try:
                results = backend.accept_tokens(matchers, own)
            except BaseException as error:  # nobody knows which of them have advanced
                for state in states:
                    state.fail(error)
                continue
            if set(results) == {False}:
                continue
            for state, token, must_end in zip(states, own, results, strict=True):
                if must_end is None:
                    state.accept_token(token)
                elif must_end:
                    state.has_ended = True
