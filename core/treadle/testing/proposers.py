"""The conformance suite of proposers: drafts that can be checked, and an output that stays.

::

    class TestMine(PluginSuite, ProposerSuite):
        plugin = "proposers:mine"
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.engine import Proposer
from treadle.api.kinds import PROPOSERS
from treadle.config import EngineConfig
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("ProposerSuite",)

NONE = -1
LENGTH = 60
"""Tokens of a whole output, its prompt counted."""


class ProposerSuite(PluginTest):
    """Histories repeat themselves, so that a proposer that looks back has something to propose."""

    vocab_size: ClassVar[int] = 64

    def config(self) -> EngineConfig:
        """The engine that it drafts for."""
        return EngineConfig()

    def build(self) -> Proposer:
        return self.host().create(PROPOSERS, self.key, config=self.config())

    def histories(self, count: int) -> list[list[int]]:
        """Of different lengths, the first of one id, each but that one a motif again and again."""
        draw = random.Random(count)
        found = [[draw.randrange(self.vocab_size)]]
        for row in range(1, count):
            motif = [draw.randrange(self.vocab_size) for _ in range(3 + 2 * row)]
            found.append((motif * 5)[: 11 + 9 * row])
        return found

    def drafts(self, proposer: Proposer, histories: list[list[int]]) -> Tensor:
        return proposer.propose([list(ids) for ids in histories])

    def test_two_builds_are_two_objects(self) -> None:
        assert self.build() is not self.build()

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_each_row_gets_as_many_drafts_as_it_says(self, count: int) -> None:
        import torch

        proposer = self.build()
        wanted: Any = proposer.num_speculative_tokens
        assert isinstance(wanted, int) and wanted >= 1
        for rows in (count, 1, count):
            found = self.drafts(proposer, self.histories(rows))
            assert found.dtype == torch.int64
            assert list(found.shape) == [rows, wanted]

    def test_drafts_are_ids_of_the_vocabulary(self) -> None:
        for count in (1, 2, 5, 9):
            found = self.drafts(self.build(), self.histories(count))
            assert found.min() >= NONE and found.max() < self.vocab_size, found.tolist()

    def test_nothing_follows_where_it_has_no_draft(self) -> None:
        """What comes after a gap cannot be accepted: the model has not seen the gap."""
        for count in (1, 2, 5, 9):
            for row in self.drafts(self.build(), self.histories(count)).tolist():
                drafted = [token for token in row if token != NONE]
                assert row == drafted + [NONE] * (len(row) - len(drafted))

    def test_equal_calls_give_equal_drafts(self) -> None:
        runs = []
        for _ in range(2):
            proposer, run = self.build(), []
            for count in (5, 2, 5):
                found = self.drafts(proposer, self.histories(count)).tolist()
                proposer.on_accepted([min(1, len(row)) for row in found])
                run.append(found)
            runs.append(run)
        assert runs[0] == runs[1]

    def test_a_greedy_output_is_what_it_is_without(self) -> None:
        """Rows come and go between steps, and a draft counts as far as the model agrees."""
        proposer = self.build()
        waiting = self.histories(6)
        expected = [self.continued(ids, LENGTH) for ids in waiting]
        rows: list[list[int]] = []
        done: list[list[int]] = []
        while waiting or rows:
            rows += [waiting.pop()] if waiting else []
            counts, before = [], [list(row) for row in rows]
            drafted = proposer.propose(rows).tolist()
            assert rows == before, "it has changed the batch"
            for row, drafts in zip(rows, drafted, strict=True):
                counts.append(self.agreed(row, drafts))
                row[:] = self.continued(row, len(row) + counts[-1] + 1)
            proposer.on_accepted(counts)
            done += [row[:LENGTH] for row in rows if len(row) >= LENGTH]
            rows = [row for row in rows if len(row) < LENGTH]
        assert sorted(done) == sorted(expected)

    def continued(self, ids: list[int], length: int) -> list[int]:
        """What a greedy model makes of ``ids``: it says again what came seven tokens before."""
        out = list(ids)
        while len(out) < length:
            out.append(out[-7] if len(out) >= 7 else (out[-1] + 1) % self.vocab_size)
        return out

    def agreed(self, ids: list[int], drafts: list[Any]) -> int:
        """How many of ``drafts`` a greedy model would have said itself."""
        said = self.continued(ids, len(ids) + len(drafts))[len(ids) :]
        pairs = zip(drafts, said, strict=True)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts))
