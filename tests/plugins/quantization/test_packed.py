"""Where there are kernels, no plugin keeps a weight that is unpacked for each step.

Tensors are on the CPU here, and the operations are torch's own.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from quantized_formats.bitsandbytes import FourBitFormat, Int8Format
from quantized_formats.compressed_tensors import IntFormat, UnpackedFormat
from quantized_formats.experts import PackedLayer, choices
from quantized_formats.gguf_blocks import RandomBlocks
from quantized_formats.hqq import HqqFormat
from quantized_formats.loaded import as_loaded
from torch import Tensor, nn
from treadle_gguf.scheme import GgufScheme
from treadle_gguf.types import FLOATS, TYPES

from treadle.api.cache import DeviceInfo
from treadle.api.communicators import Communicator
from treadle.api.kinds import QUANTIZATION
from treadle.plugins import PluginManager
from treadle.testing.linears import Layer, QuantizedLinear, fill, pack
from treadle.testing.packing import AwqFormat, Format, GptqFormat, Packed
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import Experts
from treadle_layers_kit.int4 import PackedInt4
from treadle_layers_kit.packed import PackedParts, PackedWeight
from treadle_layers_kit.packed_experts import PackedExperts, as_packed
from treadle_worker_kit.fusion import apply_fusions, kernel_finder

CARD = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
CUDA = DeviceInfo("cuda", (9, 0))
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


FORMATS: dict[str, Format] = {
    **{type: RandomBlocks(type) for type in TYPES if type not in FLOATS},
    **{f"GPTQ, {bits} bits": GptqFormat(bits, 128, sym=False) for bits in (2, 3, 8)},
    "GPTQ, 3 bits, symmetric": GptqFormat(3),
    "GPTQ, groups of 16": GptqFormat(group_size=16),
    "GPTQ, groups of 40": GptqFormat(group_size=40, sym=False),
    "GPTQ, 8 bits, groups of 24": GptqFormat(8, 24),
    "GPTQ, 8 bits, one group": GptqFormat(8, -1),
    "GPTQ, 3 bits, act-order": GptqFormat(3, 64, desc_act=True, sym=False),
    "GPTQ, act-order, groups of 40": GptqFormat(group_size=40, desc_act=True),
    "AWQ, groups of 16": AwqFormat(16),
    "AWQ, groups of 64": AwqFormat(64),
    "NF4": FourBitFormat(double=True),
    "FP4": FourBitFormat("fp4"),
    "LLM.int8": Int8Format(),
    "HQQ, groups of 8": HqqFormat(4, 8),
    "HQQ, 2 bits": HqqFormat(2, 64),
    "W4A16, act-order": IntFormat(act_order=True, symmetric=False),
    "W8A16, act-order": IntFormat(8, act_order=True),
    "W8A8": UnpackedFormat(),
}


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device."""
    monkeypatch.setattr(PackedWeight, "takes", staticmethod(lambda device, dtype: dtype in LIMITS))


def load(
    format: Format, layer: Layer, dtype: torch.dtype, tp_group: Communicator | None = None
) -> tuple[QuantizedLinear, Tensor, Tensor | None]:
    """The layer of one rank, and its weight and bias."""
    tensors, weight, bias = pack(format, layer)
    config = format.config()
    scheme = PluginManager().create(
        QUANTIZATION, config["quant_method"], checkpoint=config, device=CUDA
    )
    built = fill(scheme, layer, as_loaded(format, tensors), dtype, tp_group=tp_group)
    return built, weight, bias


def is_packed(layer: nn.Module) -> bool:
    """Whether a layer has a weight for kernels, and nothing else of it."""
    children = list(layer.children())
    if not children or not isinstance(children[0], PackedWeight | PackedInt4 | PackedParts):
        return False
    left = {n for n, _ in layer.named_parameters(recurse=False)} - {"bias"}
    buffers = {n for n, _ in layer.named_buffers(recurse=False)} - {"order"}
    assert len(children) == 1 and not left and not buffers, "nothing is kept twice"
    return True


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.float() - expected).norm() / expected.norm())


INPUTS = {"GPTQ, groups of 40": 240, "GPTQ, act-order, groups of 40": 224}
"""Of the second the last group has but 24."""


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dequantized_weight(name: str) -> None:
    format, layer = FORMATS[name], Layer(INPUTS.get(name, 512), (64, 32), bias=True)
    for dtype, limit in LIMITS.items():
        built, weight, bias = load(format, layer, dtype)
        assert is_packed(built) and bias is not None
        x = torch.randn(2, 3, layer.inputs).to(dtype)
        y = built(x)
        assert y.dtype == dtype and error(y, x.float() @ weight.t() + bias) < limit
    plain, *_ = load(format, layer, torch.float32)
    assert not is_packed(plain), "kernels multiply activations of 16 bits"


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    "format",
    [
        RandomBlocks("Q4_K"),
        RandomBlocks("Q6_K"),
        GptqFormat(desc_act=True),
        GptqFormat(group_size=128, desc_act=True, sym=False),
        GptqFormat(3, 128, desc_act=True, sym=False),
        GptqFormat(8, 128, desc_act=True),
        GptqFormat(2, 64, sym=False),
        IntFormat(act_order=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("split", ["row", "column"])
def test_ranks_have_packed_shares(format: Format, split: Literal["row", "column"]) -> None:
    """With act-order each has some inputs of every group."""
    layer, x = Layer(1024, (64,), split=split), torch.randn(5, 1024).half()

    def work(tp_group: Communicator) -> Tensor:
        built, *_ = load(format, layer, torch.float16, tp_group)
        assert is_packed(built)
        y: Tensor = built(x.chunk(2, 1)[tp_group.rank] if split == "row" else x)
        return y

    shares = run_on_ranks(2, work)
    y = shares[0] if split == "row" else torch.cat(shares, 1)
    assert error(y, x.float() @ pack(format, layer)[1].t()) < LIMITS[torch.float16]


@pytest.mark.usefixtures("_kernels")
def test_types_of_a_fused_layer_are_multiplied_one_after_the_other() -> None:
    types = {"a": "Q4_K", "b": "Q4_K", "c": "Q6_K", "d": "F16", "e": "Q8_0"}
    layer = Layer(512, (64, 32, 32, 32, 32), bias=True)
    home = "model.layers.0.block"
    tensors, weights = {}, []
    for (leaf, weight), type in zip(layer.weights().items(), types.values(), strict=True):
        packed = Packed({"weight": weight.half()}, weight.half().float())
        packed = packed if type == "F16" else RandomBlocks(type).pack(weight)
        tensors[f"{home}.{leaf}.weight"] = packed.tensors["weight"]
        tensors[f"{home}.{leaf}.bias"] = torch.ones(len(weight))
        weights.append(packed.weight)
    scheme = GgufScheme(
        {f"{home}.{leaf}": t for leaf, t in zip(layer.names, types.values(), strict=True)}, "a.gguf"
    )
    built = fill(scheme, layer, tensors, torch.bfloat16)
    parts: Any = built.get_submodule("repacked")
    assert isinstance(parts, PackedParts)
    assert [isinstance(part, PackedWeight) for part in parts] == [True, True, False, True]
    assert parts[0].codes.shape[1] == 96, "two of one type are one product"
    x = torch.randn(3, 512).bfloat16()
    assert error(built(x), x.float() @ torch.cat(weights).t() + 1) < LIMITS[torch.bfloat16]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    "format",
    [
        RandomBlocks("Q4_K"),
        GptqFormat(3, 128),
        GptqFormat(),
        GptqFormat(desc_act=True),
        GptqFormat(8, desc_act=True),
        AwqFormat(8),  # has places without an input
    ],
    ids=str,
)
def test_experts_are_stacked(format: Format) -> None:
    built, *_ = load(format, Layer(512, (64,)), torch.bfloat16)
    assert is_packed(built)
    assert PackedExperts.stack([as_packed(built, torch.bfloat16)] * 3, 3) is not None


ACT_ORDER: tuple[Format, ...] = (
    GptqFormat(desc_act=True),
    GptqFormat(group_size=64, desc_act=True, sym=False),
    GptqFormat(8, 64, desc_act=True, sym=False),
    IntFormat(act_order=True, symmetric=False),
)


def turn(tensors: dict[str, Tensor]) -> None:
    """Give every expert an order of its own."""
    for name in [name for name in tensors if name.endswith("g_idx")]:
        expert = int(name.split(".experts.")[1].split(".")[0])
        tensors[name] = tensors[name].roll(5 * expert)


def apply(built: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return built.method.apply(built, x, ids, built.op).float()


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None or CARD < (8, 0), reason="needs a CUDA device")
@pytest.mark.parametrize("format", ACT_ORDER, ids=str)
def test_a_card_reads_experts_in_orders_of_their_own(format: Format) -> None:
    layer, target = PackedLayer(format, 8, 512, 256), DeviceInfo("cuda", CARD)
    reference = layer.load(torch.float32, DeviceInfo("cpu"), change=turn)
    built = layer.load(torch.bfloat16, target, device="cuda", change=turn)
    served = apply_fusions(built, kernel_finder(PluginManager()), target, "bfloat16")
    assert {"packed_experts", "reorder_experts"} <= set(served.backends)
    for tokens in 1, 40, 700:
        x, ids = torch.randn(tokens, 512).bfloat16(), choices(tokens, 3, 8)
        y = apply(built, x.cuda(), ids.cuda()).cpu()
        assert error(y, apply(reference, x.float(), ids)) < 2e-2


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("format", ACT_ORDER, ids=str)
def test_experts_have_inputs_in_orders_of_their_own(format: Format) -> None:
    """Ranks that share the inputs have another number of each group's in every expert."""
    layer = PackedLayer(format, 4, 256, 128)
    reference = layer.load(torch.float32, DeviceInfo("cpu"), change=turn)
    built = layer.load(torch.float16, CUDA, change=turn)
    shares = run_on_ranks(
        2, lambda ranks: layer.load(torch.float16, CUDA, tp_group=ranks, change=turn)
    )
    for part in built, *shares:
        assert {"packed_gate_up", "packed_down"} == set(part._modules)
        order: Any = part.get_submodule("packed_down").order
        assert order.dtype is torch.int32 and not torch.equal(order[0], order[1])
    for tokens in 1, 7:
        x, ids = torch.randn(tokens, 256), choices(tokens, 2, 4)
        expected = apply(reference, x, ids)
        assert error(apply(built, x.half(), ids), expected) < 3e-3
        parts = [apply(share, x.half(), ids) for share in shares]
        assert error(parts[0] + parts[1], expected) < 3e-3


@pytest.mark.usefixtures("_kernels")
def test_groups_that_would_be_padding_stay_as_they_are() -> None:
    format = HqqFormat(4, 4)
    built, weight, _ = load(format, Layer(256, (32,)), torch.float16)
    assert not is_packed(built)
    x = torch.randn(3, 256).half()
    assert error(built(x), x.float() @ weight.t()) < LIMITS[torch.float16]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e7])
def test_steps_of_any_size_are_kept_in_half_precision(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(8, 4, generator=generator) * size
    scales[3] = 0
    offsets, codes = scales * 0.3, torch.randint(16, (8, 128), generator=generator)
    packed = PackedWeight.pack(
        lambda begin, end: codes[begin:end], scales, 32, 128, torch.bfloat16,
        tuple(float(n) for n in range(16)), offsets=offsets,
    )  # fmt: skip
    assert packed is not None and packed.scales is not None
    assert packed.scales.dtype is torch.float16
    x = torch.eye(128)
    expected = (codes.unflatten(1, (4, 32)) * scales[..., None] + offsets[..., None]).flatten(1)
    torch.testing.assert_close(packed(x).t(), expected, rtol=5e-4, atol=0)
