"""The second child process of ``treadle doctor``: the device, and every backend's offer for it.

It imports torch and initializes the device, which the process of the command line must not do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.api import kinds
from treadle.api.attention import AttentionRequest, KernelRequest, MaskKind
from treadle.api.cache import DeviceInfo
from treadle.api.communicators import CommunicatorRequest
from treadle.api.plugin_kind import PluginKind
from treadle.plugins import PluginManager, PluginSelection

if TYPE_CHECKING:
    from treadle_layers_kit.kernel_op import KernelOp

__all__ = ("ATTENTION", "BackendReport", "DeviceReport", "Survey", "main")

CUDA_DTYPE, CPU_DTYPE = "bfloat16", "float32"

ATTENTION = ("plain", "fp8 cache", "sliding window", "soft cap", "head size 256")
"""Names, in the report, of the attention requests that backends answer."""


class Survey(msgspec.Struct, frozen=True):
    """A request to the child process.

    ``selection`` holds the plugins that may be imported; ``device`` is the option of that name.
    """

    selection: PluginSelection
    device: str = "auto"


class BackendReport(msgspec.Struct, frozen=True):
    """One backend's answer: a score, or the reasons of its refusal."""

    name: str
    score: int | None = None
    reasons: list[str] = []


class DeviceReport(msgspec.Struct, frozen=True):
    """The torch build, its device, and the backends' offers, the best first."""

    torch: str
    cuda: str | None
    device: str
    name: str
    capability: str
    memory: int
    attention: dict[str, list[BackendReport]]
    kernels: dict[str, list[BackendReport]]
    communicators: list[BackendReport] = []


def survey(spec: Survey) -> DeviceReport:
    import torch

    from treadle.api.devices import device_info
    from treadle.testing.kernel_ops import KERNEL_OPS
    from treadle_worker_kit.device import pick_device

    device = pick_device(spec.device)
    info = device_info(device)
    plugins = PluginManager.from_selection(spec.selection)
    return DeviceReport(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        device=str(device),
        name=info.name,
        capability=".".join(map(str, info.capability or ())),
        memory=info.memory,
        attention={
            name: _backend_reports(plugins, kinds.ATTENTION_BACKENDS, request=request)
            for name, request in requests(info)
        },
        kernels={op.name: _kernel(plugins, op, info) for op in KERNEL_OPS.values()},
        communicators=_backend_reports(
            plugins, kinds.COMMUNICATORS, request=CommunicatorRequest(info, 2)
        ),
    )


def requests(device: DeviceInfo) -> Iterator[tuple[str, AttentionRequest]]:
    """Yield the attention requests of an 8B model and of models with other features."""
    dtype = CUDA_DTYPE if device.type == "cuda" else CPU_DTYPE
    base = AttentionRequest(device, dtype, dtype, 128, 32, 8, 128**-0.5)
    variants = (
        base,
        replace(base, kv_dtype="fp8_e4m3"),
        replace(base, mask=MaskKind.SLIDING, window=4096),
        replace(base, softcap=50.0),
        replace(base, head_size=256, scale=1 / 16),
    )
    return zip(ATTENTION, variants, strict=True)


def _kernel(plugins: PluginManager, op: KernelOp, device: DeviceInfo) -> list[BackendReport]:
    dtype = CUDA_DTYPE if device.type == "cuda" else CPU_DTYPE
    request = KernelRequest(device, dtype, op.example_sizes)
    return _backend_reports(plugins, kinds.KERNEL_OPS, op=op.name, request=request)


def _backend_reports(
    plugins: PluginManager, kind: PluginKind[Any], **arguments: Any
) -> list[BackendReport]:
    offers, refusals = plugins.offers(kind, **arguments)
    reports = [BackendReport(offer.name, offer.score) for offer in offers]
    return reports + [
        BackendReport(refusal.name, reasons=list(refusal.reasons)) for refusal in refusals
    ]


def main() -> None:
    """Answer one request on standard output; what plugins print goes to standard error."""
    answer = os.dup(1)
    os.dup2(2, 1)
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=Survey)
    reply = msgspec.json.encode(survey(spec))
    with os.fdopen(answer, "wb") as out:
        out.write(reply)
    sys.stderr.flush()
    os._exit(0)
