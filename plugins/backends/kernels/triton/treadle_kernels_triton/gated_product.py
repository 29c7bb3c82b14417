"""``silu_and_mul`` of a product with a packed weight: where this is unpacked, in one kernel."""

from __future__ import annotations

from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from treadle.api.types import KernelRequest
from treadle_kernels_triton.activation import silu_and_mul
from treadle_kernels_triton.hopper.gated_linear import GatedLinear, create_gated_linear
from treadle_triton_kit.support import supports_pdl

__all__ = ("GatedProduct", "PackedProduct")


class PackedProduct(Protocol):
    """A product whose weight is its further arguments."""

    def try_kernels(self, x: Tensor, *weight: Any) -> Tensor | None:
        """``[..., in]`` to ``[..., out]``; ``None``: the weight has to be unpacked."""

    def unpack(self, x: Tensor, *weight: Any) -> Tensor:
        """The weight ``[out, in]`` in the type of ``x``."""


class GatedProduct:
    """For weights of one shape: the left half of the outputs are gates."""

    def __init__(
        self, product: PackedProduct, gated_linear: GatedLinear | None, *, use_pdl: bool
    ) -> None:
        """``gated_linear``: what multiplies and gates many rows in one kernel on Hopper, where there is such a thing."""
        self.product, self.gated_linear, self.use_pdl = product, gated_linear, use_pdl

    @classmethod
    def load(cls, product: PackedProduct, request: KernelRequest) -> GatedProduct:
        """With what the device allows."""
        is_hopper = (request.device.capability or (0, 0))[0] == 9
        gated_linear = create_gated_linear(request.dtype) if is_hopper else None
        return cls(product, gated_linear, use_pdl=supports_pdl(request.device))

    def __call__(self, x: Tensor, *weight: Any) -> Tensor:
        """``[..., in]`` to ``[..., out / 2]``."""
        y = self.product.try_kernels(x, *weight)
        if y is None:
            matrix = self.product.unpack(x, *weight)
            if self.gated_linear is not None and x.dtype == self.gated_linear.dtype:
                gated = self.gated_linear.try_forward(x, matrix)
                if gated is not None:
                    return gated
            y = F.linear(x, matrix)
        return silu_and_mul(y, use_pdl=self.use_pdl)
