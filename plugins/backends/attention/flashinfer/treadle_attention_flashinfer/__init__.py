"""Attention with FlashInfer's kernels: the bid. FlashInfer is imported when the backend is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from treadle.api import impl
from treadle.api.types import AttentionRequest, MaskKind, Offer, Refusal

if TYPE_CHECKING:
    from treadle.api.types import AttentionBackend

__all__ = ("treadle_attention",)

SCORE = 45
"""Below the Triton kernels (80): on an H200 it is faster for prompts, but slower for decode steps of one
row or of hundreds, and with an fp8 cache the other way round. Above xformers (40), which copies the
keys of prompts. Figures: docs/attention.md."""

EAGER_SCORE = 20
"""Where decode steps cannot be captured in CUDA graphs: above plain torch (10) only."""

PAGE_SIZES = (64, 32, 16, 128)
HEAD_SIZES = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")
_FP8 = ("fp8_e4m3", "fp8_e5m2")
_MASKS = (MaskKind.CAUSAL, MaskKind.SLIDING, MaskKind.BIDIRECTIONAL)

# XQA, which decodes: the generations of devices it has kernels for, and its tile of query heads.
_XQA_GENERATIONS = (9, 10, 12)
_XQA_GROUP = 32

_NVCC = Path("/usr/local/cuda/bin/nvcc")
"""Where FlashInfer looks when the path of programs has none."""


@impl
def treadle_attention(request: AttentionRequest, options: Mapping[str, Any]) -> Offer | Refusal:
    """Offer for CUDA devices of capability 8.0 and later, where FlashInfer is installed."""
    reasons = tuple(_reasons(request))
    if reasons:
        return Refusal("flashinfer", reasons)
    xqa = has_xqa(request)

    def create() -> AttentionBackend:
        from treadle_attention_flashinfer.backend import FlashInferAttention

        return FlashInferAttention(request, xqa=xqa)

    score = SCORE if xqa else EAGER_SCORE
    return Offer("flashinfer", score, create, page_sizes=PAGE_SIZES, graph_safe=xqa)


def has_xqa(request: AttentionRequest) -> bool:
    """Whether rows of one token are served by XQA, which is planned on the device alone.

    All other kernels are planned on the host, from the lengths of each step, which a captured graph
    does not know.
    """
    return (
        (request.device.capability or (0, 0))[0] in _XQA_GENERATIONS
        and request.heads // request.kv_heads <= _XQA_GROUP
        and request.softcap is None
        and request.kv_dtype != "fp8_e5m2"
    )


def _reasons(request: AttentionRequest) -> list[str]:
    if request.device.kind != "cuda":  # nothing else about it would matter
        return [f"device {request.device.kind!r} is not CUDA"]
    capability = request.device.capability or (0, 0)
    shown = ".".join(map(str, capability))
    kv_dtype = request.dtype if request.kv_dtype == "auto" else request.kv_dtype
    checks = (
        (capability >= (8, 0), f"capability {shown} is below 8.0"),
        (request.dtype in _DTYPES, f"dtype {request.dtype} is neither bfloat16 nor float16"),
        (
            kv_dtype == request.dtype or kv_dtype in _FP8,
            f"kv_dtype {kv_dtype} is neither {request.dtype} nor fp8",
        ),
        (
            kv_dtype not in _FP8 or capability >= (8, 9) or capability < (8, 0),
            f"{kv_dtype} needs capability 8.9, this is {shown}",
        ),
        (
            request.head_size in HEAD_SIZES,
            f"head size {request.head_size} is not one of {', '.join(map(str, HEAD_SIZES))}",
        ),
        (
            request.page_size in (None, *PAGE_SIZES),
            f"page size {request.page_size} is not one of {sorted(PAGE_SIZES)}",
        ),
        (request.mask in _MASKS, f"mask {request.mask.value} is not supported"),
        (not request.sinks, "attention sinks are not supported"),
        (not request.latent, "latent (MLA) caches are not supported"),
    )
    return request.contradictions() + [why for good, why in checks if not good] + _missing()


def _missing() -> list[str]:
    """What the installation lacks. An import would cost two seconds, metadata costs nothing."""
    version = _version("flashinfer-python")
    if version is None:
        return ["flashinfer is not installed: pip install flashinfer-python"]
    if not (0, 7, 2) <= version < (0, 8):
        shown = ".".join(map(str, version))
        return [
            f"flashinfer {shown} is not 0.7 from 0.7.2 on: pip install 'flashinfer-python>=0.7.2,<0.8'"
        ]
    if _version("flashinfer-jit-cache") is not None:
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


def _version(distribution: str) -> tuple[int, ...] | None:
    """The first three numbers of an installed version."""
    try:
        return tuple(map(int, re.findall(r"\d+", metadata.version(distribution))[:3]))
    except metadata.PackageNotFoundError:
        return None
