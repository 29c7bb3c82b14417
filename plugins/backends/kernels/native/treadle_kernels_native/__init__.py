"""A decoder's whole step in one call, in C, on CPUs, and weights in eight or four bits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from treadle.api import impl
from treadle.api.hookspecs import Options
from treadle.api.types import DeviceInfo, KernelOffer, KernelRequest, QuantizationScheme, Refusal
from treadle.errors import UnsupportedModelError

if TYPE_CHECKING:
    from treadle_kernels_native.experts import NativeExperts
    from treadle_layers_kit.decode_step import DecodeStep

__all__ = (
    "TREADLE_OPTIONS",
    "NativeOptions",
    "treadle_kernel_op",
    "treadle_quantization",
    "treadle_report",
)

NAME = "native"
DTYPES = ("float32", "bfloat16")


class NativeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the native kernels."""

    isa: Annotated[
        Literal["auto", "generic", "avx2", "avx512", "avx512_bf16", "amx", "dotprod", "i8mm"],
        msgspec.Meta(
            description="Instruction set: the best one that the machine has, or a lesser one."
        ),
    ] = "auto"
    pin: Annotated[
        bool,
        msgspec.Meta(
            description="Keep each thread on a core of its own. Pays only where no other process computes."
        ),
    ] = False


TREADLE_OPTIONS = {"kernel_ops:native": NativeOptions}


@impl
def treadle_kernel_op(
    op: str, request: KernelRequest, options: Options
) -> KernelOffer | Refusal | None:
    """Offer ``decode_step`` and, for models of another form, ``fused_experts`` on a CPU."""
    if op not in ("decode_step", "fused_experts"):
        return None
    if reasons := _refusals(op, request):
        return Refusal(NAME, tuple(reasons))

    def load_experts() -> NativeExperts:
        from treadle_kernels_native.experts import NativeExperts

        return NativeExperts(options["isa"])

    def load() -> DecodeStep:
        from functools import partial

        from treadle_kernels_native.plan import plan

        return partial(plan, isa=options["isa"], pin=options["pin"])

    return KernelOffer(NAME, 80, load if op == "decode_step" else load_experts)


@impl
def treadle_quantization(
    method: str, checkpoint: Mapping[str, Any], device: DeviceInfo
) -> QuantizationScheme | None:
    """Quantize a checkpoint while it is loaded. Raises ``UnsupportedModelError`` for what is quantized."""
    if method not in ("int8", "int4"):
        return None
    if device.type != "cpu":
        raise UnsupportedModelError(
            f"quantization is {method!r}, which is made for CPUs; on {device.type!r} use 'fp8'"
        )
    if checkpoint:
        raise UnsupportedModelError(
            f"quantization is {method!r}, but the checkpoint has a quantization_config of its own; leave "
            "the option away, or use a checkpoint in full precision"
        )
    from treadle_kernels_native.int4 import Int4Scheme
    from treadle_kernels_native.int8 import Int8Scheme
    from treadle_kernels_native.linears import NativeLinears

    return (Int8Scheme if method == "int8" else Int4Scheme)(NativeLinears())


@impl
def treadle_report() -> str | None:
    """Say which instructions the library would use, or why it cannot be used."""
    from treadle_kernels_native.library import LibraryError, instruction_sets, load_library

    try:
        name = instruction_sets(load_library())[-1].name.lower()
    except LibraryError as error:
        return f"native kernels: models on a CPU run in torch; {error}"
    return f"native kernels: instruction set {name}"


def _refusals(op: str, request: KernelRequest) -> list[str]:
    from treadle_kernels_native.library import missing_reason

    reasons = []
    if request.device.type != "cpu":
        reasons.append(f"device {request.device.type!r} is not a CPU")
    if request.dtype not in DTYPES:
        reasons.append(f"dtype {request.dtype} is not one of {', '.join(DTYPES)}")
    if reason := missing_reason():
        reasons.append(reason)
    if op == "fused_experts":
        reasons += [
            f"{name} {request.shape[name]} is not a multiple of 32"
            for name in ("in_features", "intermediate_size")
            if request.shape[name] % 32
        ]
    return reasons
