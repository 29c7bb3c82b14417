"""The random numbers: the published generator, uniform, and independent where it matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from treadle.sampling.noise import BITS, GOLDEN, WORD, keys, mix, uniforms

Follows = Callable[[Tensor, Tensor], None]
CELLS = 64


def numbers(seeds: list[int], positions: list[int]) -> Tensor:
    """``[len(seeds), 2]``, float64."""
    cells = torch.tensor([keys(seed) for seed in seeds], dtype=torch.int64)
    return uniforms(cells[:, :2], cells[:, 2:], torch.tensor(positions, dtype=torch.int64))


def cell(u: Tensor, cells: int = CELLS) -> Tensor:
    return (u * cells).long()


def even(cells: int) -> Tensor:
    return torch.full((cells,), 1 / cells, dtype=torch.float64)


def test_the_finaliser_is_splitmix64() -> None:
    # The first outputs of SplitMix64 from state 1234567, as published with the reference code.
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + GOLDEN) & WORD
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 987654321])
def test_tensors_compute_what_integers_do(seed: int) -> None:
    offset, second, step, _ = (value & WORD for value in keys(seed))
    positions = [0, 1, 7, 2**20, 2**31 - 1]
    actual = numbers([seed] * len(positions), positions)
    for row, position in enumerate(positions):
        for stream, start in enumerate((offset, second)):
            word = mix((start + step * position) & WORD)
            assert float(actual[row, stream]) == (word >> (64 - BITS)) * 2.0**-BITS


def test_uniform_over_positions(assert_follows: Follows) -> None:
    u = numbers([5] * 200_000, list(range(200_000)))
    for stream in range(2):
        assert_follows(cell(u[:, stream]), even(CELLS))
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0


def test_uniform_over_seeds(assert_follows: Follows) -> None:
    u = numbers(list(range(50_000)), [17] * 50_000)
    for stream in range(2):
        assert_follows(cell(u[:, stream]), even(CELLS))


def test_every_bit_is_fair() -> None:
    words = (numbers([3] * 20_000, list(range(20_000))) * 2.0**BITS).long()
    ones = ((words.unsqueeze(-1) >> torch.arange(BITS)) & 1).double().mean(dim=0)
    assert float((ones - 0.5).abs().max()) < 4.5 * 0.5 / 20_000**0.5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(((8, 0), 0), ((8, 1), 0), id="the next position"),
        pytest.param(((8, 0), 0), ((8, 0), 1), id="the other stream"),
        pytest.param(((8, 0), 1), ((8, 1), 0), id="the other stream of the next position"),
        pytest.param(((8, 0), 0), ((9, 0), 0), id="the next seed"),
        pytest.param(((8, 1), 0), ((9, 0), 0), id="the next seed, one position behind"),
        pytest.param(((8, 0), 0), ((-8, 0), 0), id="the negated seed"),
        pytest.param(((8, 0), 0), ((8 + 2**32, 0), 0), id="a seed that differs in the upper half"),
    ],
)
def test_pairs_are_independent(
    first: tuple[tuple[int, int], int], second: tuple[tuple[int, int], int], assert_follows: Follows
) -> None:
    count = 60_000

    def column(source: tuple[tuple[int, int], int]) -> Tensor:
        (seed, shift), stream = source
        return numbers([seed] * count, list(range(shift, count + shift)))[:, stream]

    pairs = cell(column(first), 16) * 16 + cell(column(second), 16)
    assert_follows(pairs, even(256))


def test_pairs_of_many_seeds_are_independent(assert_follows: Follows) -> None:
    count = 60_000
    u = [numbers(list(range(shift, count + shift)), [4] * count)[:, 0] for shift in (0, 1)]
    assert_follows(cell(u[0], 16) * 16 + cell(u[1], 16), even(256))
