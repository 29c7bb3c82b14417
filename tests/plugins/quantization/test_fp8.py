"""treadle-fp8 against checkpoints as AutoFP8, DeepSeek, Mistral and Meta store them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_formats.experts import PackedLayer
from torch import Tensor
from treadle_fp8.config import read_config
from treadle_fp8.scheme import Fp8Scheme

from treadle.api.cache import DeviceInfo
from treadle.errors import CheckpointError
from treadle.testing.linears import Layer, fill, pack
from treadle.testing.packing import Fp8Format
from treadle.testing.plugin import PluginSuite
from treadle.testing.quantization import QuantizationSuite
from treadle.testing.ranks import run_on_ranks
from treadle_fp8_kit import quantize, scaled_mm
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.small_floats import fp8_to_float32


class TestFp8(PluginSuite, QuantizationSuite):
    plugin = "quantization:fp8"
    formats = {
        "matrix": Fp8Format(),
        "matrix, static": Fp8Format(static=True),
        "blocks": Fp8Format("block"),
        "small blocks": Fp8Format("block", block=(32, 64)),
        "outputs": Fp8Format("channel"),
    }
    refused = {
        "format": ({"fmt": "e5m2"}, "'e5m2'"),
        "activations": ({"activation_scheme": "sometimes"}, "'sometimes'"),
        "block": ({"weight_block_size": [128]}, "[128]"),
        "names": ({"ignored_layers": "lm_head"}, "ignored_layers"),
        "another method": ({"quant_method": "squeezellm"}, "'squeezellm'"),
    }


def multiplies_by_row() -> bool:
    """Whether torch multiplies in FP8 on a CPU with a scale for each row, which 2.11 does not."""
    ones = torch.ones(16, 16)
    scale, x = ones[:, :1].contiguous(), ones.to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(x, x.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


rounds_activations = pytest.mark.skipif(not multiplies_by_row(), reason="torch has no product")
HOPPER = DeviceInfo("cuda", (9, 0))
LAYER = Layer(128, (64, 32), bias=True)


def scheme(format: Fp8Format, device: DeviceInfo = HOPPER, **changes: Any) -> Fp8Scheme:
    return Fp8Scheme(read_config("fp8", {**format.config(), **changes}), device)


def error(built: Any, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: int) -> float:
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.float() @ weight.t() + (0 if bias is None else bias)
    return float((built(x).float() - expected).norm() / expected.norm())


@rounds_activations
@pytest.mark.parametrize("format", [Fp8Format(), Fp8Format(static=True), Fp8Format("channel")])
def test_products_in_fp8_round_the_activations(format: Fp8Format) -> None:
    """torch multiplies in FP8 on a CPU, too: slowly, but by the same rules."""
    tensors, weight, bias = pack(format, LAYER)
    for dtype in (torch.bfloat16, torch.float16):
        built = fill(scheme(format), LAYER, tensors, dtype)
        assert built.method.uses_product  # type: ignore[attr-defined]
        for rows in (1, 7):
            assert 5e-3 < error(built, weight, bias, dtype, rows) < 0.06


def test_float32_is_never_rounded_to_fp8() -> None:
    tensors, weight, bias = pack(Fp8Format(), LAYER)
    assert (
        error(
            fill(scheme(Fp8Format()), LAYER, tensors, torch.float32), weight, bias, torch.float32, 3
        )
        < 1e-5
    )


def test_activations_beyond_a_static_scale_saturate() -> None:
    format = Fp8Format(static=True)
    tensors, *_ = pack(format, Layer(128, (64,)))
    built = fill(scheme(format), Layer(128, (64,)), tensors, torch.bfloat16)
    assert built(torch.full((2, 128), 1e4, dtype=torch.bfloat16)).isfinite().all()


@rounds_activations
def test_a_bound_of_the_activation_scale() -> None:
    """What is beyond is cut off: ``activation_scale_ub`` of Meta's checkpoints."""
    format = Fp8Format("channel", extra={"activation_scale_ub": 1.0})
    tensors, weight, _ = pack(format, Layer(128, (64,)))
    built = fill(scheme(format), Layer(128, (64,)), tensors, torch.bfloat16)
    x = torch.full((1, 128), 0.5, dtype=torch.bfloat16)
    x[0, 0] = 3.0
    cut = x.clone().clamp_max(1.0).float() @ weight.t()
    assert (built(x).float() - cut).norm() < 0.06 * cut.norm()


def test_a_form_that_does_not_work_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether torch says so (blocks, on a CPU) or computes something else."""
    layer = Layer(256, (128,))
    tensors, weight, bias = pack(Fp8Format("block"), layer)
    built = fill(scheme(Fp8Format("block")), layer, tensors, torch.bfloat16)
    assert not built.method.uses_product and error(built, weight, bias, torch.bfloat16, 3) < 0.01  # type: ignore[attr-defined]
    right = torch._scaled_mm

    def swapped(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **more: Any) -> Tensor:
        return right(a, b, scale_a=scale_a, scale_b=scale_b.flip(1), **more)

    monkeypatch.setattr(torch, "_scaled_mm", swapped)
    tensors, weight, bias = pack(Fp8Format(), LAYER)
    built = fill(scheme(Fp8Format()), LAYER, tensors, torch.bfloat16)
    assert not built.method.uses_product and error(built, weight, bias, torch.bfloat16, 3) < 0.01  # type: ignore[attr-defined]


def test_blocks_are_laid_out_as_torch_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's own description of the operator, and by the numbers it must give."""

    def described(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **more: Any) -> Tensor:
        (rows, depth), columns = a.shape, b.shape[1]
        assert scale_a.shape == (rows, depth // 128) and scale_a.stride(0) == 1
        assert scale_b.shape == (depth // 128, columns // 128) and scale_b.stride(0) == 1
        assert columns == 128 or scale_b.stride(1) % 4 == 0
        left = a.float() * scale_a.repeat_interleave(128, 1)
        right = b.float() * scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (left @ right).to(more["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", described)
    layer = Layer(384, (256, 128), bias=True)
    tensors, weight, bias = pack(Fp8Format("block"), layer)
    built = fill(scheme(Fp8Format("block")), layer, tensors, torch.bfloat16)
    assert built.method.uses_product  # type: ignore[attr-defined]
    assert 5e-3 < error(built, weight, bias, torch.bfloat16, 5) < 0.06


def test_names_of_other_writers() -> None:
    """Mistral's checkpoints, and scales of what is not in FP8 here."""
    format = Fp8Format(static=True, scale_name="weight_scale_inv")
    tensors, weight, _ = pack(format, Layer(128, (64,)))
    tensors = {n.replace("input_scale", "activation_scale"): t for n, t in tensors.items()}
    for name in ("attn.q_scale", "prob_output_scale", "o_proj.output_scale"):
        tensors[f"model.layers.0.block.{name}"] = torch.tensor(1.0)
    built = fill(scheme(format), Layer(128, (64,)), tensors, torch.float32)
    assert error(built, weight, None, torch.float32, 3) < 1e-5


def test_static_scales_are_not_needed_for_dynamic_activations() -> None:
    tensors, weight, bias = pack(Fp8Format(static=True), LAYER)
    built = fill(scheme(Fp8Format()), LAYER, tensors, torch.float32)
    assert error(built, weight, bias, torch.float32, 3) < 1e-5


def test_blocks_that_a_share_of_the_outputs_would_cut() -> None:
    format, layer = Fp8Format("block"), Layer(128, (192,), split="column")
    tensors, *_ = pack(format, layer)
    with pytest.raises(CheckpointError, match=r"blocks of 128.*tensor_parallel_size"):
        run_on_ranks(2, lambda r: fill(scheme(format), layer, tensors, torch.float32, tp_group=r))


def test_rows_of_zeros_can_be_quantized_while_loading() -> None:
    quantization = Fp8Scheme(read_config("fp8", {}), HOPPER)
    layer = Layer(64, (32,))
    weight = torch.randn(32, 64)
    weight[3] = 0
    built = fill(
        quantization, layer, {"model.layers.0.block.a_proj.weight": weight}, torch.bfloat16
    )
    y = built(torch.randn(2, 64).bfloat16())
    assert y.isfinite().all() and (y[:, 3] == 0).all()
    assert built.get_parameter("weight").dtype is torch.float8_e4m3fn


def test_every_number_is_widened_exactly() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = numbers[~numbers.float().isnan()]
    assert len(finite) == 254
    assert torch.equal(fp8_to_float32(finite), finite.float())


@rounds_activations
def test_kernels_that_fail_for_a_shape_are_not_used_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch multiplies there; other shapes keep them."""
    widths: list[int] = []

    class Kernels:
        """torch's rounding, in the place of a kernel that cannot round 128 numbers."""

        def quantize_per_row(
            self, x: Tensor, *arguments: Any, **more: Any
        ) -> tuple[Tensor, Tensor]:
            widths.append(x.shape[1])
            if x.shape[1] == 128:
                raise ZeroDivisionError("no compiler")
            return quantize.quantize_per_row(x, *arguments, **more)

    monkeypatch.setattr(scaled_mm, "choose_tile", lambda *shape, has_block_scales: None)
    quantization = scheme(Fp8Format())
    monkeypatch.setattr(quantization._scaled_mm, "_kernels", Kernels())
    for inputs in 128, 64:
        layer = Layer(inputs, (64,))
        tensors, weight, bias = pack(Fp8Format(), layer)
        built = fill(quantization, layer, tensors, torch.bfloat16)
        assert built.method.uses_product  # type: ignore[attr-defined]
        widths.clear()
        assert error(built, weight, bias, torch.bfloat16, 7) < 0.06
        assert widths == ([] if inputs == 128 else [64])


@pytest.mark.parametrize(
    "format",
    [Fp8Format(), Fp8Format(static=True), Fp8Format("channel"), Fp8Format("block", block=(32, 64))],
    ids=str,
)
def test_devices_without_fp8_have_kernels_that_unpack_in_registers(
    monkeypatch: pytest.MonkeyPatch, format: Fp8Format
) -> None:
    monkeypatch.setattr(PackedWeight, "takes", staticmethod(lambda device, dtype: True))
    tensors, weight, bias = pack(format, LAYER)
    built = fill(scheme(format, DeviceInfo("cuda", (8, 0))), LAYER, tensors, torch.bfloat16)
    assert isinstance(built.get_submodule("repacked"), PackedWeight)
    assert {name for name, _ in built.named_parameters(recurse=False)} == {"bias"}
    assert error(built, weight, bias, torch.bfloat16, 3) < 0.01
    experts = PackedLayer(format, 4, 128, 64).load(torch.bfloat16, DeviceInfo("cuda", (8, 0)))
    assert {"packed_gate_up", "packed_down"} == set(experts._modules)
