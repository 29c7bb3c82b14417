"""Orders of inputs in which groups are runs."""

from __future__ import annotations

import pytest
import torch

from treadle_layers_kit.packed_order import arrange


@pytest.mark.parametrize("group", [16, 24, 40, 100, 128])
@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("step_bits", [16, 32])
def test_every_input_lies_in_a_run_of_its_group(group: int, share: int, step_bits: int) -> None:
    inputs = 960
    generator = torch.Generator().manual_seed(group)
    index = (torch.arange(inputs) // group)[torch.randperm(inputs, generator=generator)]
    index = index[: inputs // share]
    order = arrange(index, 4, step_bits)
    assert order is not None and order.size % 16 == 0
    assert len(order.places) == order.size * len(order.groups) <= 2 * len(index)
    runs = order.places.view(-1, order.size)
    for places, of_group in zip(runs, order.groups, strict=True):
        found = places[places < len(index)]
        assert len(found) and bool((index[found] == of_group).all())
    found = order.places[order.places < len(index)]
    assert torch.equal(found.sort().values, torch.arange(len(index)))
    x = torch.randn(3, len(index), generator=generator) + 9
    moved = order.apply(x)
    assert torch.equal(moved[:, order.places < len(index)], x[:, found])
    assert not moved[:, order.places == len(index)].any()


def test_whole_groups_are_only_sorted() -> None:
    index = (torch.arange(512) // 64).flip(0)
    order = arrange(index, 4, 16)
    assert order is not None and order.size == 64
    assert torch.equal(order.groups, torch.arange(8))
    assert order.places[:64].tolist() == list(range(448, 512))


def test_small_groups_are_left_alone() -> None:
    assert arrange(torch.arange(512) // 8, 4, 16) is not None
    assert arrange(torch.arange(512) // 4, 4, 16) is None
