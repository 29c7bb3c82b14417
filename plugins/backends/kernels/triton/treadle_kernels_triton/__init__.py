"""Fused Triton kernels for the layers and the sampler, on CUDA devices from Ampere on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from treadle.api import impl
from treadle.api.types import KernelOffer, KernelRequest, Refusal
from treadle_triton_kit.support import supports_pdl, triton_refusals

__all__ = ("treadle_kernel_op",)

NAME = "triton"
MODULES = {
    "rms_norm": "norm",
    "fused_add_rms_norm": "norm",
    "fused_add_partials_rms_norm": "norm",
    "silu_and_mul": "activation",
    "clamped_swiglu": "activation",
    "topk_softmax": "routing",
    "combine_experts": "routing",
    "fused_experts": "experts",
    "rope_and_cache": "rotary",
    "rope_and_cache_fp8": "rotary",
    "linear": "linear",
    "linear_split_k": "linear",
    "linear_silu_and_mul": "linear",
    "int4_linear": "int4.linear",
    "int4_linear_silu_and_mul": "int4.linear",
    "packed_linear": "packed.linear",
    "packed_linear_silu_and_mul": "packed.linear",
    "packed_experts": "packed.experts",
    "reorder_experts": "packed.reorder",
    "sample": "sample",
    "argmax": "sample",
    "apply_bitmask": "bitmask",
}
PACKED = {
    "int4_linear": 32,
    "int4_linear_silu_and_mul": 32,
    "packed_linear": 16,
    "packed_linear_silu_and_mul": 16,
    "packed_experts": 16,
}
"""The number that groups are a multiple of."""
LINEARS = ("linear", "linear_split_k", "linear_silu_and_mul")


@impl
def treadle_kernel_op(op: str, request: KernelRequest) -> KernelOffer | Refusal | None:
    if op not in MODULES:
        return None
    reasons = tuple(_refusals(op, request))
    if reasons:
        return Refusal(NAME, reasons)
    return KernelOffer(NAME, 80, partial(_load, op, request))


def _refusals(op: str, request: KernelRequest) -> list[str]:
    reasons = triton_refusals(request.device)
    if request.dtype not in ("bfloat16", "float16", "float32"):
        reasons.append(f"dtype {request.dtype} is not supported")
    head_size = request.shape.get("head_size", 0)
    if op == "rope_and_cache_fp8" and (request.device.capability or (8, 9)) < (8, 9):
        reasons.append(f"needs compute capability 8.9, this is {request.device.capability}")
    if op in ("rope_and_cache", "rope_and_cache_fp8") and head_size not in (32, 64, 128, 256):
        reasons.append(f"head size {head_size} is not 32, 64, 128 or 256")
    if op.endswith("_norm") and request.shape["size"] > 32768:
        reasons.append(f"size {request.shape['size']} is more than 32768")
    if op in LINEARS and request.shape["in_features"] % 16:
        reasons.append(f"in_features {request.shape['in_features']} is not a multiple of 16")
    if op in (*PACKED, "fused_experts") and request.dtype == "float32":
        reasons.append("dtype float32 is not supported")
    if op in PACKED and request.shape["group"] % PACKED[op]:
        reasons.append(f"group {request.shape['group']} is not a multiple of {PACKED[op]}")
    return reasons


def _load(op: str, request: KernelRequest) -> Callable[..., Any]:
    module = import_module(f"{__name__}.{MODULES[op]}")
    if hasattr(module, "load"):  # which depends on more than the start that all have in common
        return module.load(op, request)  # type: ignore[no-any-return]
    return partial(getattr(module, op), use_pdl=supports_pdl(request.device))
