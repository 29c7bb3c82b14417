"""Products of int8 weights and activations: which layers have them, and what they compute.

torch multiplies int8 on a CPU, too, so that layers for a CUDA device are filled with tensors of the CPU here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from quantized_formats.compressed_tensors import IntFormat, UnpackedFormat
from quantized_formats.loaded import as_loaded
from quantized_formats.quark import QuarkFormat
from quantized_formats.torchao import TorchAoFormat
from torch import Tensor

from treadle.api.cache import DeviceInfo
from treadle.api.kinds import QUANTIZATION
from treadle.api.models import SupportsGatedInput
from treadle.plugins import PluginManager
from treadle.testing.linears import Layer, QuantizedLinear, fill, pack
from treadle.testing.packing import Format
from treadle.testing.ranks import run_on_ranks
from treadle_fp8_kit.tiles import choose_int8_tile
from treadle_layers_kit import ops
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_experts import as_packed

HOPPER = DeviceInfo("cuda", (9, 0))
CARD = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
FUSED = Layer(128, (64, 32, 40), bias=True)
FORMATS: Mapping[str, Format] = {
    "outputs": UnpackedFormat(inputs="symmetric"),
    "matrix": UnpackedFormat(strategy="tensor", inputs="symmetric"),
    "zero points": UnpackedFormat(inputs="asymmetric"),
    "static": UnpackedFormat(inputs="symmetric", static=True),
    "static, zero points": UnpackedFormat(inputs="asymmetric", static=True),
    "quark": QuarkFormat("int8", "per_channel", rounds_inputs=True),
    "torchao": TorchAoFormat(rounds_inputs=True),
}


def layer_of(
    format: Format,
    layer: Layer,
    dtype: torch.dtype = torch.bfloat16,
    target: DeviceInfo = HOPPER,
    **named: Any,
) -> QuantizedLinear:
    config = format.config()
    scheme = PluginManager().create(
        QUANTIZATION, config["quant_method"], checkpoint=config, device=target
    )
    tensors = as_loaded(format, pack(format, layer)[0])
    return fill(scheme, layer, tensors, dtype, **named)


def rounded(format: Format, x: Tensor) -> Tensor:
    """What a row means once it is in int8, in float64."""
    x = x.double()
    static = getattr(format, "static", False)
    if getattr(format, "inputs", "") != "asymmetric":
        scale = 0.04 if static else x.abs().amax(dim=-1, keepdim=True) / 127
        return (x / scale).round().clamp(-128, 127) * scale
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = 0.04 if static else (high - low) / 255
    zero = 5 if static else (-128 - low / scale).round()
    return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale


def error(y: Tensor, expected: Tensor) -> float:
    assert y.shape == expected.shape
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_activations_are_rounded_as_the_checkpoint_says(name: str) -> None:
    format = FORMATS[name]
    _, weight, bias = pack(format, FUSED)
    assert bias is not None
    for dtype, limit in (torch.bfloat16, 3e-3), (torch.float16, 6e-4):
        built = layer_of(format, FUSED, dtype)
        assert built.get_parameter("weight").dtype is torch.int8
        for rows in 1, 3, 16, 17, 64, 200:
            x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).to(dtype)
            y = built(x)
            assert y.dtype == dtype
            assert error(y, rounded(format, x) @ weight.double().t() + bias) < limit
            exact = x.double() @ weight.double().t() + bias
            assert 2e-3 < error(rounded(format, x) @ weight.double().t() + bias, exact) < 2e-2
    assert built(x.new_empty(0, 128)).shape == (0, 136)


@pytest.mark.parametrize("name", FORMATS)
def test_the_gate_is_rounded_with_what_it_multiplies(name: str) -> None:
    built = layer_of(FORMATS[name], FUSED)
    assert isinstance(built.method, SupportsGatedInput)
    x = torch.randn(5, 256).bfloat16()
    assert torch.equal(built.gated(x), built(ops.silu_and_mul(x)))
    on_cpu = layer_of(FORMATS[name], FUSED, torch.float32, DeviceInfo("cpu"))
    x = x.float()
    assert torch.equal(on_cpu.gated(x), on_cpu(ops.silu_and_mul(x)))


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_share_a_layer(name: str) -> None:
    """Each rounds what it has: of its own inputs each row has another scale."""
    format = FORMATS[name]
    columns, rows = Layer(128, (64, 32), split="column"), Layer(256, (48,), bias=True, split="row")
    x = torch.randn(6, 256).bfloat16()
    _, weight, _ = pack(format, columns)
    expected = rounded(format, x[:, :128]) @ weight.double().t()
    shares = run_on_ranks(2, lambda ranks: layer_of(format, columns, tp_group=ranks))
    for rank, share in enumerate(shares):
        assert error(share(x[:, :128]), expected[:, columns.shares(rank, 2)]) < 3e-3
    _, weight, bias = pack(format, rows)
    assert bias is not None
    halves = torch.cat([rounded(format, half) for half in x.split(128, dim=1)], dim=1)

    def work(ranks: Any) -> Tensor:
        return layer_of(format, rows, tp_group=ranks)(x.split(128, dim=1)[ranks.rank])

    for y in run_on_ranks(2, work):
        assert error(y, halves @ weight.double().t() + bias) < 6e-3


def test_static_scales_of_fused_matrices_are_one() -> None:
    """Nothing that any of them represents is cut off."""
    for inputs in "symmetric", "asymmetric":
        format = UnpackedFormat(inputs=inputs, static=True)  # type: ignore[arg-type]
        tensors, *_ = pack(format, FUSED)
        scales = {"a_proj": 0.01, "b_proj": 0.03, "c_proj": 0.02}
        for name, scale in scales.items():
            tensors[f"model.layers.0.block.{name}.input_scale"] = torch.tensor([scale])
        config = format.config()
        scheme = PluginManager().create(
            QUANTIZATION, config["quant_method"], checkpoint=config, device=HOPPER
        )
        static = fill(scheme, FUSED, tensors, torch.bfloat16).get_parameter("input_scale")
        scale, zero = (static, 0.0) if inputs == "symmetric" else static.tolist()
        assert (-128 - zero) * scale <= (-128 - (inputs != "symmetric") * 5) * 0.03 + scale / 2
        assert (127 - zero) * scale >= (127 - (inputs != "symmetric") * 5) * 0.03 - scale / 2


@pytest.mark.parametrize(
    "format",
    [
        UnpackedFormat(),
        UnpackedFormat(symmetric=False, inputs="symmetric"),
        IntFormat(8, strategy="channel"),
        IntFormat(8, group_size=32, packed=False),
        QuarkFormat("int8", "per_channel"),
        TorchAoFormat(),
    ],
    ids=str,
)
def test_activations_of_other_layers_stay_as_they_are(format: Format) -> None:
    _, weight, bias = pack(format, FUSED)
    assert bias is not None
    x = torch.randn(7, 128).bfloat16()
    assert error(layer_of(format, FUSED)(x), x.double() @ weight.double().t() + bias) < 6e-3


def test_neither_are_those_of_float32_and_of_devices_without_int8() -> None:
    format = FORMATS["outputs"]
    _, weight, bias = pack(format, FUSED)
    assert bias is not None
    x = torch.randn(7, 128)
    expected = x.double() @ weight.double().t() + bias
    assert error(layer_of(format, FUSED, torch.float32)(x), expected) < 1e-6
    old = layer_of(format, FUSED, torch.float16, DeviceInfo("cuda", (7, 5)))
    assert error(old(x.half()), expected) < 1e-3
    odd = Layer(120, (64,))  # cut by no 16
    _, weight, _ = pack(format, odd)
    y = layer_of(format, odd, torch.float16)(x[:, :120].half())
    assert error(y, x[:, :120].double() @ weight.double().t()) < 1e-3


def test_a_product_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    format = FORMATS["outputs"]
    _, weight, bias = pack(format, FUSED)
    assert bias is not None
    right = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: right(a, b).roll(1, 1))
    with caplog.at_level("INFO"):
        built = layer_of(format, FUSED)
    assert "no int8 product with scales by rows (its result is wrong): dequantizing" in caplog.text
    x = torch.randn(7, 128).bfloat16()
    assert error(built(x), x.double() @ weight.double().t() + bias) < 6e-3


def test_experts_are_grouped_as_weights_without_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their kernel reads those that were chosen; one product for each would read all."""
    layer = Layer(128, (64, 32))
    built = layer_of(FORMATS["outputs"], layer)
    given: list[Any] = []
    monkeypatch.setattr(PackedWeight, "pack", lambda *arguments: given.append(arguments))
    assert as_packed(built, torch.bfloat16) is None
    ((rows, scales, group, inputs, dtype, levels),) = given
    _, weight, _ = pack(FORMATS["outputs"], layer)
    assert (group, inputs, dtype, levels) == (128, 128, torch.bfloat16, "int8")
    torch.testing.assert_close(rows(0, 96).float() * scales, weight)


def test_tiles_follow_the_rows() -> None:
    for width, depth in (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288):
        few = choose_int8_tile(1, width, depth)
        assert few.block_m == 16
        assert (few.num_splits > 1) == (width == 4096), "programs for the whole device"
        large = {choose_int8_tile(rows, width, depth) for rows in (513, 1000, 8192, 100_000)}
        assert len(large) == 1, "a start runs 513 rows and the most, and compiles for these"


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None or CARD < (8, 0), reason="needs a card with int8 kernels")
def test_a_card_groups_experts() -> None:
    layer = Layer(512, (256, 256))
    built = layer_of(FORMATS["outputs"], layer, target=DeviceInfo("cuda", CARD), device="cuda")
    packed = as_packed(built, torch.bfloat16)
    assert packed is not None
    x, (_, weight, _) = torch.randn(5, 512).bfloat16(), pack(FORMATS["outputs"], layer)
    assert error(packed(x.cuda()).cpu(), x.double() @ weight.double().t()) < 6e-3


@pytest.mark.gpu
@pytest.mark.skipif(CARD is None or CARD < (8, 0), reason="needs a card with int8 kernels")
@pytest.mark.parametrize("name", FORMATS)
def test_a_card_multiplies_in_int8(name: str) -> None:
    format = FORMATS[name]
    target = DeviceInfo("cuda", CARD)
    for layer in FUSED, Layer(2064, (33,)), Layer(2048, (4096,)), Layer(512, (24576,), bias=True):
        _, weight, bias = pack(format, layer)
        built = layer_of(format, layer, target=target, device="cuda")
        assert built.get_parameter("weight").dtype is torch.int8
        assert not built.method.product._failed_shapes, "with the kernels"  # type: ignore[attr-defined]
        for rows in 1, 3, 16, 17, 64, 200, 700:
            x = torch.randn(rows, layer.inputs, generator=torch.Generator().manual_seed(rows))
            x = x.bfloat16()
            expected = rounded(format, x) @ weight.double().t() + (0 if bias is None else bias)
            y = built(x.cuda())
            assert error(y.cpu(), expected) < 4e-3
            graph, given = torch.cuda.CUDAGraph(), x.cuda()
            with torch.cuda.graph(graph):
                replayed = built(given)
            graph.replay()
            assert torch.equal(replayed, y)
