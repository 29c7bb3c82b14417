"""treadle-gptq against checkpoints in AutoGPTQ's packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from treadle_gptq.config import read_config
from treadle_gptq.packing import dequantize, unpack_inputs, unpack_outputs
from treadle_gptq.scheme import GptqScheme

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError, ConfigError, UnsupportedModelError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.linears import Layer, fill, pack
from treadle.testing.models import TinyModel
from treadle.testing.packing import AwqFormat, GptqFormat, pack_checkpoint
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit.quantized import CpuInt4


class TestGptq(PluginSuite, QuantizationSuite):
    plugin = "quantization:gptq"
    formats = {
        "4 bits": GptqFormat(),
        "4 bits, no g_idx": GptqFormat(group_size=128, with_g_idx=False),
        "4 bits, one group": GptqFormat(group_size=-1, sym=False),
        "4 bits, act-order": GptqFormat(desc_act=True),
        "4 bits, act-order, asymmetric": GptqFormat(group_size=64, desc_act=True, sym=False),
        "4 bits, version 2": GptqFormat(sym=False, version=2),
        "8 bits": GptqFormat(bits=8, group_size=128),
        "8 bits, act-order, version 2": GptqFormat(bits=8, desc_act=True, sym=False, version=2),
        "3 bits": GptqFormat(bits=3, sym=False),
        "3 bits, act-order, version 2": GptqFormat(bits=3, desc_act=True, version=2),
        "2 bits": GptqFormat(bits=2, sym=False),
    }
    refused = {
        "five bits": ({"bits": 5}, "5 bits"),
        "no bits": ({"bits": None}, "None"),
        "format": ({"checkpoint_format": "marlin"}, "'marlin'"),
        "group size": ({"group_size": 0}, "group_size 0"),
        "names": ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
        "pattern": ({"dynamic": {"-:(": {}}}, "'-:('"),
    }


def scheme(format: GptqFormat, **changes: Any) -> GptqScheme:
    return GptqScheme(read_config({**format.config(), **changes}), DeviceInfo("cpu"))


def spec(*names: str, bias: bool = False) -> LinearSpec:
    return LinearSpec(names[0], names, 128, (64,) * len(names), bias, torch.float32)


def close(built: Any, weight: Tensor, inputs: int) -> None:
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(built(x), x @ weight.t(), atol=1e-4, rtol=1e-3)


def test_the_packing_is_that_of_autogptq() -> None:
    """Words written out: the first code is in the lowest bits."""
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack_inputs(word, 4).flatten().tolist() == list(range(8))
    assert unpack_outputs(word, 4, 0).tolist() == [list(range(8))]
    assert unpack_outputs(word, 4, 1).tolist() == [list(range(1, 9))]
    assert unpack_inputs(torch.tensor([[-2]], dtype=torch.int32), 8).flatten().tolist() == [
        254, 255, 255, 255,
    ]  # fmt: skip


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_zero_survive_version_1(bits: int) -> None:
    """To take one away from them borrows from the neighbour, which adding gives back."""
    zeros = torch.tensor([[0, 1, 0, 0, 3, 2, 1, 0] * 4])
    packed = GptqFormat(bits, sym=False, version=2).pack(torch.rand(32, 32)).tensors["qzeros"]
    assert not packed.any(), "weights above zero have zero points of zero"
    words = torch.zeros(1, 32 * bits // 32, dtype=torch.int64)
    for column, zero in enumerate(zeros[0].tolist()):
        words[0, column * bits // 32] += zero << (column * bits % 32)
    ones = sum(1 << shift for shift in range(0, 32, bits))
    assert torch.equal(unpack_outputs((words - ones).int(), bits, 1), zeros.int())


# What GPTQModel 7.7 reads as codes from the bits of three words, of which the first is in the lowest bits.
THREE = [0x76543210, 0x89ABCDEF, 0x13579BDF]
CODES = [
    0,
    2,
    0,
    1,
    3,
    0,
    5,
    2,
    6,
    6,
    5,
    7,
    6,
    3,
    3,
    6,
    3,
    5,
    6,
    4,
    0,
    7,
    7,
    6,
    3,
    3,
    6,
    3,
    5,
    6,
    4,
    0,
]


def test_three_bits_lie_in_three_words() -> None:
    words = torch.tensor(THREE).to(torch.int32)
    assert unpack_inputs(words[:, None], 3).flatten().tolist() == CODES
    assert unpack_outputs(words[None], 3, 0).flatten().tolist() == CODES
    assert unpack_outputs(words[None], 3, 1).flatten().tolist() == [(c + 1) % 8 for c in CODES]


@pytest.mark.parametrize(("bits", "version"), [(2, 2), (3, 1), (3, 2), (4, 2), (8, 2)])
def test_numbers_are_those_of_gptqmodel(bits: int, version: int) -> None:
    model_dequant = pytest.importorskip(
        "gptqmodel.utils.model_dequant", reason="compares with GPTQModel itself"
    )
    generator = torch.Generator().manual_seed(bits)
    qweight, qzeros = (
        torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        for shape in ((96 * bits // 32, 64), (3, 64 * bits // 32))
    )
    scales, index = torch.rand(3, 64, generator=generator), torch.arange(96) // 32
    stored = qzeros if version == 2 else model_dequant._correct_gptq_v1_qzeros(qzeros, bits)
    zeros = model_dequant.unpack_cols(stored, bits)
    expected = (model_dequant.unpack_rows(qweight, bits) - zeros[index]) * scales[index]
    ours = unpack_outputs(qzeros, bits, 2 - version).float()
    actual = dequantize(qweight, scales, ours, bits, 32, None, torch.float32)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4, "sym": True},
        {"bits": 4, "sym": False},
        {"bits": 4, "desc_act": True},
        {"bits": 8},
        {"bits": 3},
        {"bits": 2},
    ],
    ids=str,
)
def test_logits_are_those_of_gptqmodel(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gptqmodel.utils.model_dequant", reason="compares with GPTQModel itself")
    monkeypatch.chdir(tmp_path)  # it logs to a folder of the current one
    from quantized_formats.gptq_reference import compare

    compare(tmp_path, options)


def test_groups_that_do_not_divide_end_with_a_smaller_one() -> None:
    layer = Layer(96, (32,))
    for format in (GptqFormat(group_size=64), GptqFormat(group_size=64, desc_act=True)):
        tensors, weight, _ = pack(format, layer)
        close(fill(scheme(format), layer, tensors, torch.float32), weight, 96)


def test_inputs_in_order_need_no_index() -> None:
    """Also when act-order was asked for and the quantizer kept its groups together."""
    format = GptqFormat()
    tensors, weight, _ = pack(format, Layer(128, (32,)))
    built = fill(scheme(format, desc_act=True), Layer(128, (32,)), tensors, torch.float32)
    assert dict(built.named_buffers()) == {}
    close(built, weight, 128)


def test_a_share_of_the_inputs_has_rows_of_every_group() -> None:
    format, layer = GptqFormat(desc_act=True), Layer(256, (32,), split="row")
    tensors, _, _ = pack(format, layer)
    built = run_on_ranks(
        2, lambda r: fill(scheme(format), layer, tensors, torch.float32, tp_group=r)
    )
    for share in built:
        assert share.get_parameter("scales").shape == (8, 32)
        assert share.get_buffer("index").shape == (128,)


def test_matrices_in_different_orders_cannot_be_fused() -> None:
    layer = Layer(128, (32, 32))
    tensors, *_ = pack(GptqFormat(desc_act=True), layer)
    name = next(n for n in tensors if n.endswith("b_proj.g_idx"))
    tensors[name] = tensors[name].flip(0)
    with pytest.raises(CheckpointError, match=r"b_proj\.g_idx.*they differ"):
        fill(scheme(GptqFormat(desc_act=True)), layer, tensors, torch.float32)


def test_an_index_beyond_the_groups() -> None:
    layer = Layer(128, (32,))
    tensors, *_ = pack(GptqFormat(), layer)
    name = next(n for n in tensors if n.endswith("g_idx"))
    tensors[name] = tensors[name] + 1
    with pytest.raises(CheckpointError, match="names groups 1 to 4, but there are 4"):
        fill(scheme(GptqFormat()), layer, tensors, torch.float32)


def test_shares_that_fill_no_word() -> None:
    for layer in (Layer(136, (32,), split="row"), Layer(128, (24,), split="column")):
        with pytest.raises(ConfigError, match=r"(68 input|12 output) features"):
            run_on_ranks(
                2,
                lambda r, own=layer: fill(scheme(GptqFormat()), own, {}, torch.float32, tp_group=r),
            )  # type: ignore[misc]


def test_a_bias_of_zeros_that_the_model_has_not() -> None:
    """AutoGPTQ gives every layer one."""
    layer = Layer(128, (32, 16))
    tensors, weight, _ = pack(GptqFormat(), layer)
    for name, size in zip(layer.names, layer.outputs, strict=True):
        tensors[f"model.layers.0.block.{name}.bias"] = torch.zeros(size)
    built = fill(scheme(GptqFormat()), layer, tensors, torch.float32)
    close(built, weight, 128)
    assert not any("bias" in name for name, _ in built.named_parameters())
    tensors["model.layers.0.block.b_proj.bias"] = torch.ones(16)
    with pytest.raises(CheckpointError, match="attention_bias"):
        fill(scheme(GptqFormat()), layer, tensors, torch.float32)


def test_dynamic_rules() -> None:
    """The first that matches the beginning of a name decides."""
    rules = {
        r"-:model\.layers\.0\.": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": -1},
        r".*\.(gate|up)_proj": {"group_size": 64},
        r"+:.*\.router": {},
    }
    quantization = scheme(GptqFormat(), dynamic=rules)
    assert quantization.linear_method(spec("model.layers.0.mlp.down_proj")) is None
    down, router = (
        quantization.linear_method(spec(f"model.layers.1.{n}")) for n in ("down_proj", "router")
    )
    gate_up = quantization.linear_method(spec("model.layers.1.gate_proj", "model.layers.1.up_proj"))
    assert [(m.bits, m.group) for m in (down, gate_up, router)] == [(8, -1), (4, 64), (4, 32)]  # type: ignore[attr-defined, union-attr]
    with pytest.raises(UnsupportedModelError, match="stores differently"):
        quantization.linear_method(spec("model.layers.1.gate_proj", "model.layers.1.down_proj"))
    with pytest.raises(UnsupportedModelError, match="dynamic rule 'a' says 5 bits"):
        scheme(GptqFormat(), dynamic={"a": {"bits": 5}}).linear_method(spec("a"))


def test_only_some_modules_of_a_block() -> None:
    lists = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    quantization = scheme(GptqFormat(), modules_in_block_to_quantize=lists)
    home = "model.layers.3"
    assert quantization.linear_method(spec(f"{home}.mlp.down_proj")) is not None
    assert quantization.linear_method(spec(f"{home}.mlp.up_proj")) is None
    assert (
        quantization.linear_method(spec(f"{home}.self_attn.q_proj", f"{home}.self_attn.k_proj"))
        is not None
    )


def test_a_quantized_head() -> None:
    assert scheme(GptqFormat()).linear_method(spec("lm_head")) is None
    assert scheme(GptqFormat(), lm_head=True).linear_method(spec("lm_head")) is not None


def test_four_bits_in_bfloat16_on_a_cpu_sort_the_weight_too() -> None:
    format = GptqFormat(desc_act=True)
    tensors, weight, _ = pack(format, Layer(128, (32,)))
    built = fill(scheme(format), Layer(128, (32,)), tensors, torch.bfloat16)
    assert isinstance(built.get_submodule("int4"), CpuInt4)
    x = torch.randn(3, 128).bfloat16()
    expected = x.float() @ weight.t()
    assert (built(x).float() - expected).norm() < 0.01 * expected.norm()


def test_checkpoints_of_auto_round(tmp_path: Path) -> None:
    """The packing is that of GPTQ or AWQ, and layers in full are named one by one."""
    source = make_checkpoint(tmp_path / "source", hidden_size=128, intermediate_size=128)
    plugins, ids = PluginManager(), torch.arange(3, 20)
    name = "model.layers.1.mlp.down_proj"
    common = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "extra_config": {name: {"bits": 16, "data_type": "float"}},
    }
    cases = {"gptq": (GptqFormat(), "auto"), "awq": (AwqFormat(), "awq")}
    for packing, (format, option) in cases.items():
        packed, plain = tmp_path / packing, tmp_path / f"{packing} plain"
        pack_checkpoint(source, packed, plain, format, ("1.mlp.down_proj",))
        config = json.loads((packed / "config.json").read_text())
        config["quantization_config"] = {**common, "packing_format": f"auto_round:auto_{packing}"}
        (packed / "config.json").write_text(json.dumps(config))
        logits = TinyModel(packed, plugins, quantization=option).logits(ids)
        assert (logits - TinyModel(plain, plugins).logits(ids)).abs().max() < 1e-4
    with pytest.raises(UnsupportedModelError, match="set --quantization awq"):
        TinyModel(tmp_path / "awq", plugins)
