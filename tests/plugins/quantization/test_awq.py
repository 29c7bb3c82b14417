"""treadle-awq against checkpoints in AutoAWQ's packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_formats.awq import GemvFormat
from treadle_awq.config import read_config
from treadle_awq.packing import unpack
from treadle_awq.scheme import AwqScheme

from treadle.api.cache import DeviceInfo
from treadle.errors import CheckpointError, ConfigError
from treadle.testing.linears import Layer, fill, pack
from treadle.testing.packing import AwqFormat
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite
from treadle.testing.ranks import run_on_ranks


class TestAwq(PluginSuite, QuantizationSuite):
    plugin = "quantization:awq"
    formats = {
        "groups of 32": AwqFormat(32),
        "groups of 128": AwqFormat(128),
        "one group": AwqFormat(-1),
        "old names": AwqFormat(
            64, {"bits": None, "w_bit": 4, "group_size": None, "q_group_size": 64}
        ),
        "gemv": GemvFormat(),
        "gemv, groups of 128": GemvFormat(group=128),
        "gemv_fast": GemvFormat("gemv_fast", 64),
    }
    refused = {
        "bits": ({"bits": 3}, "3 bits"),
        "no number": ({"bits": "four"}, "'four'"),
        "version": ({"version": "marlin"}, "'marlin'"),
        "groups of gemv": ({"version": "gemv", "group_size": 16}, "group_size 16"),
        "group size": ({"group_size": 0}, "group_size 0"),
        "names": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }


def scheme(**changes: Any) -> AwqScheme:
    return AwqScheme(read_config({**AwqFormat().config(), **changes}), DeviceInfo("cpu"))


def test_the_packing_is_that_of_autoawq() -> None:
    """The columns 0 to 7 of one word, written out."""
    word = 0x75316420  # from the lowest nibble: columns 0, 2, 4, 6, 1, 3, 5, 7
    assert unpack(torch.tensor([[word]])).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    word = 0xFEDCBA98 - (1 << 32)
    codes = unpack(torch.tensor([[word]], dtype=torch.int32))
    assert codes.tolist() == [[8, 12, 9, 13, 10, 14, 11, 15]]


def test_groups_that_do_not_divide() -> None:
    layer = Layer(96, (32,))
    with pytest.raises(CheckpointError, match="96 input features, which groups of 64"):
        fill(scheme(group_size=64), layer, {}, torch.float32)


def test_outputs_that_fill_no_word() -> None:
    with pytest.raises(ConfigError, match="12 output features"):
        fill(scheme(), Layer(64, (12,)), {}, torch.float32)
    layer = Layer(64, (24,), split="column")
    with pytest.raises(ConfigError, match="smaller tensor_parallel_size"):
        run_on_ranks(2, lambda ranks: fill(scheme(), layer, {}, torch.float32, tp_group=ranks))


def test_runs_that_ranks_would_cut() -> None:
    """96 inputs on each rank are one run of ``gemv_fast`` and a half."""
    layer = Layer(192, (64,), split="row")
    format = GemvFormat("gemv_fast")
    built = AwqScheme(read_config(format.config()), DeviceInfo("cpu"))
    with pytest.raises(ConfigError, match="runs of 64"):
        run_on_ranks(2, lambda ranks: fill(built, layer, {}, torch.float32, tp_group=ranks))


def test_a_fused_matrix_of_the_checkpoint() -> None:
    """Phi and others store q, k and v as one matrix."""
    fused, parts = Layer(64, (96,)), Layer(64, (48, 24, 24))
    tensors, weight, _ = pack(AwqFormat(), fused)
    tensors = {name.replace("a_proj", "fused"): t for name, t in tensors.items()}
    built = fill(scheme(), parts, tensors, torch.float32)
    x = torch.randn(3, 64)
    torch.testing.assert_close(built(x), x @ weight.t(), atol=1e-5, rtol=1e-4)
