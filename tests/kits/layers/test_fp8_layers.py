"""FP8 layers hand the scales of a checkpoint to what multiplies in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_formats.compressed_tensors import FloatFormat
from torch import Tensor

from treadle.api.models import LinearSpec
from treadle.testing.linears import Layer, fill, pack
from treadle_layers_kit.small_floats import Fp8Linear

SIZES = (256, 128)


class Product:
    """A product in torch that takes the forms of scales that FP8 products have."""

    def __init__(self) -> None:
        self.forms: list[str] = []

    def supports_rows(self, weight: Tensor, dtype: torch.dtype) -> bool:
        return True

    supports_blocks = supports_rows

    def mm_rows(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        *rounding: Any,
        **_: Any,
    ) -> Tensor:
        self.forms.append("rows")
        return F.linear(x, weight.float() * scale[:, None], bias)

    def pad_block_scale(self, scale: Tensor) -> Tensor:
        return scale

    def mm_blocks(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, **_: Any
    ) -> Tensor:
        self.forms.append("blocks")
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return F.linear(x, weight.float() * spread, bias)


class Scheme:
    name = "fp8"

    def __init__(self, method: Fp8Linear) -> None:
        self.method = method

    def linear_method(self, spec: LinearSpec) -> Fp8Linear:
        return self.method

    def experts_method(self, spec: object) -> None:
        return None

    def kv_cache_dtype(self, layer: str) -> None:
        return None


@pytest.mark.parametrize("scales", ["channel", "tensor", "block"])
def test_products_in_fp8_get_the_scales_of_the_checkpoint(scales: str) -> None:
    format: Any = FloatFormat(scales, (128, 128))
    layer = Layer(256, SIZES)
    tensors, weight, _ = pack(format, layer)
    block = (128, 128) if scales == "block" else (1, 0)
    product = Product()
    built = fill(Scheme(Fp8Linear(scales, block, product)), layer, tensors, torch.float32)  # type: ignore[arg-type]
    x = torch.randn(3, 256)
    assert torch.allclose(built(x), F.linear(x, weight), atol=1e-4)
    assert product.forms == ["blocks" if scales == "block" else "rows"]
