"""Four-bit weights row by row, and who gets them in that layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from treadle_layers_kit.int4_packing import Int4Packing
from treadle_layers_kit.quantized import CpuInt4
from treadle_layers_kit.row_int4 import RowInt4, pack_rows, unpack_rows
from treadle_layers_kit.row_packing import RowPacking, even_order

INPUTS, OUT, GROUP = 256, 1056, 64


def parts(middle: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points, ``[in, out]`` and ``[groups, out]``."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (INPUTS, OUT), generator=generator, dtype=torch.int32)
    scales = torch.rand(INPUTS // GROUP, OUT, generator=generator).half()
    zeros = torch.randint(0, 17, scales.shape, generator=generator)
    return codes, scales, torch.full_like(zeros, 8) if middle else zeros


def packed(packing: Int4Packing, middle: bool = False, in_order: bool = True) -> object:
    codes, scales, zeros = parts(middle)
    return packing.pack(lambda a, b: codes[:, a:b], scales, zeros, GROUP, in_order=in_order)


def test_codes_lie_where_the_library_reads_them() -> None:
    """128 of a row in 64 bytes: the first 64 in the lower halves, the others in the upper ones."""
    numbers = torch.arange(-8, 8).repeat(3, 16)
    codes = pack_rows(numbers)
    assert (codes.dtype, codes.shape) == (torch.uint8, (3, 128))
    assert int(codes[0, 1]) == (-7 & 15) | (-7 & 15) << 4
    assert torch.equal(unpack_rows(codes), numbers.to(torch.int8))
    numbers[:, 64:] = 3
    assert int(pack_rows(numbers)[0, 2]) == (-6 & 15) | 3 << 4


@pytest.mark.parametrize("middle", [False, True])
def test_the_weight_is_that_of_codes_and_zero_points(middle: bool) -> None:
    codes, scales, zeros = parts(middle)
    rows = RowInt4.pack(lambda a, b: codes[:, a:b], scales, zeros, INPUTS)
    spread = scales.float().repeat_interleave(GROUP, 0)
    expected = ((codes - zeros.repeat_interleave(GROUP, 0)) * spread).t()
    assert rows.group == GROUP and (rows.offsets is None) is middle
    assert torch.equal(rows.dense(torch.float32), expected)
    x = torch.randn(2, 3, INPUTS)
    torch.testing.assert_close(rows(x), x @ expected.t(), atol=1e-3, rtol=1e-4)


def test_only_who_asks_gets_rows() -> None:
    packing = Int4Packing(nn.Module(), INPUTS, GROUP, torch.bfloat16)
    assert packing.row_misfit() == "" and isinstance(packed(packing), CpuInt4 | None)
    packing.by_rows = True
    assert isinstance(packed(packing), RowInt4)
    assert isinstance(packed(packing, in_order=False), RowInt4)


def test_inputs_are_sorted_where_all_groups_have_one_size() -> None:
    index = torch.tensor([1, 0, 2, 1, 0, 2])
    order = even_order(index, 2)
    assert order is not None and order.tolist() == [1, 4, 0, 3, 2, 5]
    assert even_order(torch.tensor([1, 0, 1, 1]), 2) is None


@pytest.mark.parametrize(
    ("inputs", "group", "dtype", "misfit", "reason"),
    [
        (256, 8, torch.bfloat16, "", "groups of 8"),
        (256, 48, torch.bfloat16, "", "256 inputs in groups of 48"),
        (256, 64, torch.float32, "", "quantized weights for float32"),
        (256, 64, torch.float16, "", "quantized weights for float16"),
        (256, 64, torch.bfloat16, "is mixed", "is mixed"),
    ],
)
def test_a_misfit_has_a_reason(
    inputs: int, group: int, dtype: torch.dtype, misfit: str, reason: str
) -> None:
    layer = nn.Module()
    packing = RowPacking(layer, inputs, group, dtype, misfit=misfit)
    assert RowPacking.of(layer) is packing and RowPacking.of(nn.Module()) is None
    assert Int4Packing.of(layer) is None and reason in packing.row_misfit()


@pytest.mark.parametrize(("inputs", "group"), [(192, 64), (256, 16)])
def test_what_fills_no_block_is_not_packed(inputs: int, group: int) -> None:
    packing = Int4Packing(nn.Module(), inputs, group, torch.bfloat16)
    assert packing.row_misfit() == ""
    packing.by_rows = True
    codes, steps = torch.zeros(inputs, 8, dtype=torch.int32), torch.ones(inputs // group, 8)
    assert packing.pack(lambda a, b: codes[:, a:b], steps, 8 * steps, group) is None
