"""A decoder's whole step in one call, in C, on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from treadle.api import impl
from treadle.api.hookspecs import Options
from treadle.api.types import KernelOffer, KernelRequest, Refusal

if TYPE_CHECKING:
    from treadle_layers_kit.decode_step import DecodeStep

__all__ = ("TREADLE_OPTIONS", "NativeOptions", "treadle_kernel_op", "treadle_report")

NAME = "native"
DTYPES = ("float32", "bfloat16")


class NativeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the native kernels."""

    isa: Annotated[
        Literal["auto", "generic", "avx2", "avx512", "avx512_bf16", "amx"],
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
    """Offer ``decode_step`` on a CPU."""
    if op != "decode_step":
        return None
    if reasons := _refusals(request):
        return Refusal(NAME, tuple(reasons))

    def load() -> DecodeStep:
        from functools import partial

        from treadle_kernels_native.plan import plan

        return partial(plan, isa=options["isa"], pin=options["pin"])

    return KernelOffer(NAME, 80, load)


@impl
def treadle_report() -> str | None:
    """Say which instructions the library would use, or why it cannot be used."""
    from treadle_kernels_native.library import LibraryError, best_instruction_set, load_library

    try:
        name = best_instruction_set(load_library()).name.lower()
    except LibraryError as error:
        return f"native kernels: models on a CPU run in torch; {error}"
    return f"native kernels: instruction set {name}"


def _refusals(request: KernelRequest) -> list[str]:
    from treadle_kernels_native.library import missing_reason

    reasons = []
    if request.device.type != "cpu":
        reasons.append(f"device {request.device.type!r} is not a CPU")
    if request.dtype not in DTYPES:
        reasons.append(f"dtype {request.dtype} is not one of {', '.join(DTYPES)}")
    if reason := missing_reason():
        reasons.append(reason)
    return reasons
