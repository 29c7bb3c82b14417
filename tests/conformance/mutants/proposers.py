"""A proposer that looks seven tokens back, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import SHARED, Mutant, Specimen
from treadle.testing.proposers import ProposerSuite

SOURCE = """
import random
from treadle.api import impl

TREADLE = {"proposers": ["mine"]}


class Mine:
    num_speculative_tokens = 3

    def propose(self, batch):
        import torch

        return torch.tensor([self.row(ids) for ids in batch], dtype=torch.int64)

    def row(self, ids):
        found = ids[-7:-4] if len(ids) > 7 else []
        return (found + [-1] * 3)[:3]

    def on_accepted(self, counts):
        self.last = sum(counts)


@impl
def treadle_proposer(name):
    return Mine() if name == "mine" else None
"""

SHAPE = "test_each_row_gets_as_many_drafts_as_it_says"
OUTPUT = "test_a_greedy_output_is_what_it_is_without"

SPECIMENS = (
    Specimen(
        suite=ProposerSuite,
        plugin="proposers:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_two_builds_are_two_objects", SHARED),
            Mutant(SHAPE, {"int64": "int32"}),
            Mutant(SHAPE, {"* 3)[:3]": "* 4)[:4]"}),
            Mutant(
                "test_drafts_are_ids_of_the_vocabulary",
                {"found + [-1]": "[token + 60 for token in found] + [-1]"},
            ),
            Mutant(
                "test_nothing_follows_where_it_has_no_draft",
                {"(found + [-1]": "([-1] + found + [-1]"},
            ),
            Mutant(
                "test_equal_calls_give_equal_drafts",
                {"ids[-7:-4]": "[random.randrange(64) for _ in range(3)]"},
            ),
            Mutant(
                OUTPUT, {"        return (found": "        ids += found\n        return (found"}
            ),
            Mutant(OUTPUT, {"sum(counts)": "1 / min(counts)"}),
        ),
    ),
)
