"""Which slot and position each token of a step has."""

from __future__ import annotations

import pytest

from treadle.api.step_types import SchedulerOutput
from treadle.runner.inputs import expand_tokens


def step(rows: list[tuple[int, int, int]], num_decodes: int) -> SchedulerOutput:
    """A step of rows, each with its slot, computed and scheduled tokens."""
    tokens = [0] * sum(count for _, _, count in rows[num_decodes:])
    columns = [list(column) for column in zip(*rows, strict=True)]
    return SchedulerOutput(0, *columns, num_decodes, tokens, [True] * len(rows), [], [], [])


@pytest.mark.parametrize(
    ("rows", "num_decodes"),
    [
        ([(3, 7, 1), (0, 2, 1)], 2),
        ([(4, 0, 5)], 0),
        ([(4, 9, 1)], 0),
        ([(3, 7, 1), (1, 0, 3), (0, 64, 2)], 1),
        ([(2, 5, 1), (6, 8, 1), (5, 3, 4), (1, 1, 1)], 2),
    ],
)
def test_each_token_has_its_slot_and_position(
    rows: list[tuple[int, int, int]], num_decodes: int
) -> None:
    slots, positions = expand_tokens(step(rows, num_decodes))
    expected = [(slot, start + i) for slot, start, count in rows for i in range(count)]
    assert list(zip(slots.tolist(), positions.tolist(), strict=True)) == expected
