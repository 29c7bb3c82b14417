"""Placing checkpoint tensors into parameters: cutting, stacking, packing, refusing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from treadle_layers_kit import (
    Shard,
    WeightMismatchError,
    WeightTarget,
    empty_weight,
    layout_of,
    set_shards,
)
from treadle_worker_kit.shards import load_weight, weight_targets

Q = Shard(total=8, start=4, size=4)
K = Shard(total=4, start=2, size=2)


def filled(parameter: nn.Parameter) -> nn.Parameter:
    parameter.data.fill_(-1)
    return parameter


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def test_a_rank_takes_its_rows_of_each_fused_matrix() -> None:
    parameter = filled(empty_weight([6, 3], torch.float32, output_dim=0, input_dim=1))
    set_shards([parameter], [Q, K], Shard.full(3))
    q, k = numbered(8, 3), numbered(4, 3) + 100
    load_weight(parameter, k, WeightTarget("w", 1))
    load_weight(parameter, q, WeightTarget("w", 0))
    assert torch.equal(parameter.data, torch.cat([q[4:], k[2:]]))


def test_a_tensor_that_is_fused_in_the_checkpoint_is_taken_apart() -> None:
    parameter = filled(empty_weight([6, 3], torch.float32, output_dim=0, input_dim=1))
    set_shards([parameter], [Q, K], Shard.full(3))
    q, k = numbered(8, 3), numbered(4, 3) + 100
    load_weight(parameter, torch.cat([q, k]), WeightTarget("w"))
    assert torch.equal(parameter.data, torch.cat([q[4:], k[2:]]))


def test_inputs_are_cut_along_the_other_dimension() -> None:
    parameter = filled(empty_weight([5, 2], torch.float32, output_dim=0, input_dim=1))
    set_shards([parameter], [Shard.full(5)], Shard(total=6, start=2, size=2))
    full = numbered(5, 6)
    load_weight(parameter, full, WeightTarget("w"))
    assert torch.equal(parameter.data, full[:, 2:4])


def test_packed_values_and_group_scales_follow_the_same_features() -> None:
    """As GPTQ stores them: eight inputs in one int32 row, one scale for each group of inputs."""
    outputs, inputs = [Shard(16, 8, 8), Shard(16, 8, 8)], Shard(total=64, start=32, size=32)
    packed = filled(empty_weight([4, 16], torch.int32, output_dim=1, input_dim=0, input_block=8))
    scales = filled(empty_weight([2, 16], torch.float32, output_dim=1, input_dim=0, input_block=16))
    zeros = filled(
        empty_weight([2, 2], torch.int32, output_dim=1, input_dim=0, input_block=16, output_block=8)
    )
    set_shards([packed, scales, zeros], outputs, inputs)
    for parameter, rows, columns in ((packed, 8, 16), (scales, 4, 16), (zeros, 4, 2)):
        full = numbered(rows, columns, dtype=parameter.dtype)
        load_weight(parameter, full, WeightTarget("w", 1))
        num_columns = parameter.shape[1] // 2
        half = full[rows // 2 :, columns // 2 :]
        assert torch.equal(parameter.data[:, num_columns:], half), (rows, columns)
        assert (parameter.data[:, :num_columns] == -1).all(), "the other matrix was touched"


def test_a_share_that_cuts_through_a_block_is_refused() -> None:
    parameter = empty_weight([2, 1], torch.float32, output_dim=0, input_dim=1, input_block=32)
    set_shards([parameter], [Shard.full(2)], Shard(total=96, start=48, size=48))
    with pytest.raises(WeightMismatchError, match=r"48 to 96 of 96 cut through blocks of 32"):
        load_weight(parameter, numbered(2, 3), WeightTarget("w"))


def test_the_last_block_of_a_matrix_may_be_short() -> None:
    """FP8 block scales of a matrix whose sizes are no multiple of the block."""
    scales = empty_weight(
        [2, 2], torch.float32, output_dim=0, input_dim=1, output_block=128, input_block=128
    )
    set_shards([scales], [Shard.full(200)], Shard.full(130))
    load_weight(scales, numbered(2, 2), WeightTarget("w"))
    assert torch.equal(scales.data, numbered(2, 2))


def test_each_matrix_brings_one_scalar() -> None:
    scales = filled(empty_weight([3], torch.float32, per_part=True))
    set_shards([scales], [Q, K, K], None)
    load_weight(scales, torch.tensor(5.0), WeightTarget("s", 0))
    load_weight(scales, torch.tensor([6.0]), WeightTarget("s", 2))
    assert scales.tolist() == [5.0, -1.0, 6.0]
    load_weight(scales, torch.tensor(7.0), WeightTarget("s"))
    assert scales.tolist() == [7.0, 7.0, 7.0]
    with pytest.raises(WeightMismatchError, match="one value"):
        load_weight(scales, torch.ones(2), WeightTarget("s", 0))


def test_an_input_permutation_is_shared_by_fused_matrices() -> None:
    order = empty_weight([4], torch.int32, input_dim=0)
    set_shards([order], [Q, K], Shard(total=8, start=4, size=4))
    full = torch.tensor([7, 6, 5, 4, 3, 2, 1, 0], dtype=torch.int32)
    load_weight(order, full, WeightTarget("g", 1))
    assert order.tolist() == [3, 2, 1, 0]
    load_weight(order, full, WeightTarget("g", 0), sibling_loaded=True)
    with pytest.raises(WeightMismatchError, match="they differ"):
        load_weight(order, full.flip(0), WeightTarget("g", 0), sibling_loaded=True)


def test_rows_beyond_the_vocabulary_are_zero() -> None:
    for start, real in ((0, 4), (4, 3), (8, 0)):
        parameter = filled(empty_weight([4, 2], torch.float32, output_dim=0))
        parameter.data.fill_(float("nan"))
        set_shards([parameter], [Shard(total=7, start=start, size=4)], None)
        full = numbered(7, 2) + 1
        load_weight(parameter, full, WeightTarget("w"))
        assert torch.equal(parameter.data[:real], full[start : start + 4])
        assert (parameter.data[real:] == 0).all()


def test_experts_arrive_one_by_one() -> None:
    parameter = filled(empty_weight([2, 6, 3], torch.float32, output_dim=0, input_dim=1, stack=2))
    set_shards([parameter], [Q, K], Shard.full(3))
    assert len(set(weight_targets("w", parameter))) == 4
    load_weight(parameter, numbered(8, 3), WeightTarget("w", 0, 1))
    assert torch.equal(parameter.data[1, :4], numbered(8, 3)[4:])
    assert (parameter.data[0] == -1).all()
    stacked = torch.stack([numbered(12, 3), numbered(12, 3) + 50])
    load_weight(parameter, stacked, WeightTarget("w"))
    assert torch.equal(parameter.data[1, 4:], stacked[1, 10:])


def test_a_wrong_shape_is_refused_with_the_right_one() -> None:
    parameter = empty_weight([6, 3], torch.float32, output_dim=0, input_dim=1)
    set_shards([parameter], [Q, K], Shard.full(3))
    for tensor in (numbered(4, 3), numbered(8, 4), numbered(3, 8), numbered(24)):
        with pytest.raises(WeightMismatchError, match=r"expected shape \[8, 3\]"):
            load_weight(parameter, tensor, WeightTarget("w", 0))
    with pytest.raises(WeightMismatchError, match="expected 12"):
        load_weight(parameter, numbered(11, 3), WeightTarget("w"))


def test_dimensions_of_size_one_may_come_and_go() -> None:
    parameter = empty_weight([4, 1], torch.float32, output_dim=0)
    set_shards([parameter], [Shard.full(4)], None)
    load_weight(parameter, numbered(4), WeightTarget("w"))
    assert torch.equal(parameter.data, numbered(4, 1))


@pytest.mark.parametrize(
    ("have", "expected", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.float32, True),
        (torch.int32, torch.int32, True),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True),
        (torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.bfloat16, torch.float8_e4m3fn, False),
        (torch.int8, torch.bfloat16, False),
        (torch.int32, torch.int64, False),
        (torch.float32, torch.int32, False),
    ],
)
def test_only_precision_may_change(have: torch.dtype, expected: torch.dtype, fits: bool) -> None:
    parameter = empty_weight([2, 2], expected, output_dim=0, input_dim=1)
    set_shards([parameter], [Shard.full(2)], Shard.full(2))
    tensor = torch.ones(2, 2).to(have)
    if fits:
        load_weight(parameter, tensor, WeightTarget("w"))
        assert torch.equal(parameter.data.float(), torch.ones(2, 2))
    else:
        with pytest.raises(WeightMismatchError, match="expected dtype"):
            load_weight(parameter, tensor, WeightTarget("w"))


def test_a_parameter_without_layout_is_filled_whole() -> None:
    parameter = nn.Parameter(torch.zeros(3), requires_grad=False)
    assert layout_of(parameter).output_dim is None
    load_weight(parameter, numbered(3), WeightTarget("w"))
    assert torch.equal(parameter.data, numbered(3))
