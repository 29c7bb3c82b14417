"""Gated products of packed weights: what computes them; on a card, their results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import treadle_kernels_triton
from treadle_kernels_triton import gated_product
from treadle_kernels_triton.gated_product import GatedProduct

from treadle.api.cache import DeviceInfo
from treadle.api.types import KernelOffer, KernelRequest
from treadle_layers_kit import ops
from treadle_layers_kit.kernel_op import KernelOp
from treadle_layers_kit.packed_ops import PACKED_OPS

X, WEIGHT = torch.randn(6, 32), torch.randn(48, 32)
GATED = {op.name: op for op in PACKED_OPS if op.name.endswith("_silu_and_mul")}


class Product:
    """Has a kernel, or has none; records what is called."""

    def __init__(self, *, has_kernel: bool) -> None:
        self.has_kernel = has_kernel
        self.calls: list[str] = []

    def try_kernels(self, x: Tensor, *weight: Any) -> Tensor | None:
        assert weight == (WEIGHT, 7)
        self.calls.append("kernel")
        return x @ WEIGHT.t() if self.has_kernel else None

    def unpack(self, x: Tensor, *weight: Any) -> Tensor:
        assert weight == (WEIGHT, 7) and x is X
        self.calls.append("unpack")
        return WEIGHT


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("gates", ["not at all", "not these", "these", "another type"])
def test_what_computes_it(has_kernel: bool, gates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_product, "silu_and_mul", lambda y, use_pdl: ops.silu_and_mul(y))
    product, seen = Product(has_kernel=has_kernel), []

    def try_forward(x: Tensor, weight: Tensor) -> Tensor | None:
        seen.append((x, weight))
        return x.new_full((6, 24), 3.0) if gates == "these" else None

    dtype = torch.float16 if gates == "another type" else torch.float32
    gated_linear: Any = SimpleNamespace(dtype=dtype, try_forward=try_forward)
    op = GatedProduct(product, None if gates == "not at all" else gated_linear, use_pdl=False)
    y = op(X, WEIGHT, 7)
    assert product.calls == ["kernel", "unpack"][: 2 - has_kernel]
    assert len(seen) == (not has_kernel and gates in ("these", "not these"))
    if seen and gates == "these":
        assert (y == 3.0).all()
    else:
        torch.testing.assert_close(y, ops.silu_and_mul(X @ WEIGHT.t()))


@pytest.mark.gpu
@pytest.mark.parametrize("op", GATED.values(), ids=GATED)
@pytest.mark.parametrize("rows", [1, 40, 300, 2500, 4096])
def test_results(op: KernelOp, rows: int) -> None:
    """Few rows are multiplied by kernels, many by the unpacked weight; both agree with the reference."""
    sizes = dict(op.example_sizes) | {"out_features": 8192}
    device = DeviceInfo("cuda", torch.cuda.get_device_capability())
    offer = treadle_kernels_triton.treadle_kernel_op(
        op.name, KernelRequest(device, "bfloat16", sizes)
    )
    assert isinstance(offer, KernelOffer)
    kernel, generator = offer.load(), torch.Generator().manual_seed(0)
    x = torch.randn(rows, sizes["in_features"], generator=generator).bfloat16().cuda()
    weight = []
    for arg in op.args[1:]:
        if arg.name in op.examples and arg.name != "offsets":
            value = op.examples[arg.name](sizes, torch.bfloat16, generator)
        else:
            value = sizes.get(arg.name)
        weight.append(value.cuda() if isinstance(value, Tensor) else value)
    expected = op.reference(x, *weight).float()
    assert (kernel(x, *weight).float() - expected).norm() < 0.01 * expected.norm()
    kernel.product.try_kernels = lambda *_: None
    assert (kernel(x, *weight).float() - expected).norm() < 0.01 * expected.norm()
