"""Weights that stay where the file is mapped: which parameters do, and what happens to the others."""

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from treadle.api.files import ModelFiles
from treadle_layers_kit import Shard, WeightTarget, empty_weight
from treadle_layers_kit.mapping import allow_mapping, is_mapped
from treadle_layers_kit.weight import set_shards
from treadle_weights_kit.mapped import SafetensorsLoader
from treadle_worker_kit.mapped_parts import MappedParts

ROWS, COLUMNS = 96, 64


def fused(sizes: tuple[int, ...], *, allowed: bool = True) -> nn.Parameter:
    parameter = empty_weight((sum(sizes), COLUMNS), torch.bfloat16, output_dim=0, input_dim=1)
    parameter.data.fill_(float("nan"))
    set_shards([parameter], [Shard.full(size) for size in sizes], Shard.full(COLUMNS))
    if allowed:
        allow_mapping([parameter])
    return parameter


@pytest.fixture
def tensors(tmp_path) -> dict[str, Tensor]:
    """Three matrices as the loader maps them: ``a`` and ``b`` lie one behind the other, ``d`` apart."""
    stored = {name: torch.randn(ROWS, COLUMNS).bfloat16() for name in "abcd"}
    save_file(stored, tmp_path / "model.safetensors")
    files = ModelFiles(tmp_path, ("model.safetensors",), {})
    return dict(SafetensorsLoader(files).tensors(lambda name: True))


def place(
    parameter: nn.Parameter, parts: list[tuple[int, Tensor]], is_mapping: bool = True
) -> list[bool]:
    mapped = MappedParts(is_mapping)
    taken = [mapped.take(parameter, t, WeightTarget("w", part)) for part, t in parts]
    mapped.close()
    return taken


def test_a_whole_matrix_and_neighbours_of_a_fused_one_stay_in_the_file(tensors):
    whole, pair = fused((ROWS,)), fused((ROWS, ROWS))
    expected = torch.cat([tensors["a"], tensors["b"]])
    assert place(whole, [(0, tensors["a"])]) == [True]
    assert place(pair, [(1, tensors["b"]), (0, tensors["a"])]) == [True, True]
    assert is_mapped(whole) and is_mapped(pair)
    assert whole.data_ptr() == pair.data_ptr() == tensors["a"].data_ptr()
    del tensors["a"], tensors["b"]  # the parameter alone keeps the file mapped
    assert torch.equal(pair, expected)


def test_what_the_file_has_apart_or_not_at_all_is_copied(tensors):
    apart, half = fused((ROWS, ROWS)), fused((ROWS, ROWS))
    place(apart, [(0, tensors["a"]), (1, tensors["d"])])
    place(half, [(1, tensors["c"])])
    assert not is_mapped(apart) and not is_mapped(half)
    assert torch.equal(apart, torch.cat([tensors["a"], tensors["d"]]))
    assert torch.equal(half[ROWS:], tensors["c"]) and half[:ROWS].isnan().all()


@pytest.mark.parametrize("case", ["not allowed", "other dtype", "other shape", "no mapping"])
def test_what_does_not_fit_is_left_to_the_caller(tensors, case):
    parameter = fused((ROWS,), allowed=case != "not allowed")
    tensor = tensors["a"]
    if case == "other dtype":
        tensor = tensor.float()
    if case == "other shape":
        tensor = tensor[:, :32]
    assert place(parameter, [(0, tensor)], case != "no mapping") == [False]
    assert parameter.isnan().all()


def test_a_write_does_not_reach_the_file(tensors, tmp_path):
    before = (tmp_path / "model.safetensors").read_bytes()
    parameter = fused((ROWS,))
    place(parameter, [(0, tensors["a"])])
    parameter.data.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
