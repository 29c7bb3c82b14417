"""Attention with FlashInfer's kernels: the offer. FlashInfer is imported when the backend is created."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from treadle.api import impl
from treadle.api.types import AttentionOffer, AttentionRequest, MaskKind, Refusal
from treadle_paged_attention_kit.limits import BackendLimits, refusal_reasons
from treadle_paged_attention_kit.versions import installed_version, version_text

if TYPE_CHECKING:
    from treadle.api.types import AttentionBackend

__all__ = ("treadle_attention_backend",)

SCORE = 45
"""Below the Triton kernels (80): on an H200 it is faster for prompts, but slower for decode steps of one
row or of hundreds, and with an fp8 cache the other way round. Above xformers (40), which copies the
keys of prompts. Figures: docs/how/attention.md."""

EAGER_SCORE = 20
"""Where decode steps cannot be captured in CUDA graphs: above plain torch (10) only."""

PAGE_SIZES = (64, 32, 16, 128)
HEAD_SIZES = (64, 128, 256)
LIMITS = BackendLimits(
    dtypes=("bfloat16", "float16"),
    page_sizes=PAGE_SIZES,
    head_sizes=HEAD_SIZES,
    masks=(MaskKind.CAUSAL, MaskKind.SLIDING, MaskKind.BIDIRECTIONAL),
    fp8={"fp8_e4m3": (8, 9), "fp8_e5m2": (8, 9)},
)

# XQA, which decodes: the generations of devices it has kernels for, and its tile of query heads.
_XQA_GENERATIONS = (9, 10, 12)
_XQA_GROUP = 32

_NVCC = Path("/usr/local/cuda/bin/nvcc")
"""Where FlashInfer looks when the path of programs has none."""


@impl
def treadle_attention_backend(
    request: AttentionRequest, options: Mapping[str, Any]
) -> AttentionOffer | Refusal:
    """Offer for CUDA devices of capability 8.0 and later, where FlashInfer is installed."""
    reasons = refusal_reasons(request, LIMITS)
    if request.device.type == "cuda":
        reasons += _missing()
    if reasons:
        return Refusal("flashinfer", tuple(reasons))
    xqa = has_xqa(request)

    def create() -> AttentionBackend:
        from treadle_attention_flashinfer.backend import FlashInferAttention

        return FlashInferAttention(request, xqa=xqa)

    score = SCORE if xqa else EAGER_SCORE
    return AttentionOffer("flashinfer", score, create, page_sizes=PAGE_SIZES, graph_safe=xqa)


def has_xqa(request: AttentionRequest) -> bool:
    """Whether rows of one token are served by XQA, which is planned on the device alone.

    All other kernels are planned on the host, from the lengths of each step, which a captured graph
    does not know.
    """
    return (
        (request.device.capability or (0, 0))[0] in _XQA_GENERATIONS
        and request.num_heads // request.num_kv_heads <= _XQA_GROUP
        and request.softcap is None
        and request.kv_dtype != "fp8_e5m2"
    )


def _missing() -> list[str]:
    """Return what the installation lacks."""
    version = installed_version("flashinfer-python")
    if version is None:
        return ["flashinfer is not installed: pip install flashinfer-python"]
    if not (0, 7, 2) <= version < (0, 8):
        return [
            f"flashinfer {version_text(version)} is not 0.7 from 0.7.2 on: pip install 'flashinfer-python>=0.7.2,<0.8'"
        ]
    if installed_version("flashinfer-jit-cache") is not None:
        return []
    reasons = []
    if which("nvcc") is None and not _NVCC.exists():
        reasons.append(
            f"flashinfer compiles its kernels with nvcc, which is neither in PATH nor {_NVCC}: install "
            "the CUDA toolkit, or compiled kernels with pip install flashinfer-jit-cache"
        )
    if which("ninja") is None:
        reasons.append(
            "flashinfer compiles its kernels with ninja, which is not in PATH: pip install ninja, and "
            "activate the environment"
        )
    return reasons
