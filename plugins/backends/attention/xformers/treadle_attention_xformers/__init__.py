"""Attention with xformers' operators: the bid. xformers is imported when the backend is made."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from treadle.api import impl
from treadle.api.types import AttentionRequest, MaskKind, Offer, Refusal

if TYPE_CHECKING:
    from treadle.api.types import AttentionBackend

__all__ = ("treadle_attention",)

SCORE = 40
"""Between plain torch on CUDA (10) and the Triton kernels (80), than which nobody measured it faster."""

# The split-K operator takes pages of whole tiles: 64 tokens, or 32 or 16 for smaller pages.
PAGE_SIZES = (64, 128, 256, 32, 16)
# The split-K operator's and FlashAttention's in common.
HEAD_SIZES = (16, 32, 64, 128, 256)
_DTYPES = ("bfloat16", "float16")
_MASKS = (MaskKind.CAUSAL, MaskKind.BIDIRECTIONAL)


@impl
def treadle_attention(request: AttentionRequest, options: Mapping[str, Any]) -> Offer | Refusal:
    """Offer for CUDA devices of capability 8.0 and later, where xformers is installed."""
    reasons = tuple(_reasons(request))
    if reasons:
        return Refusal("xformers", reasons)

    def create() -> AttentionBackend:
        # Its import warns that its C++ library cannot be loaded, which nothing here needs.
        logging.getLogger("xformers").setLevel(logging.ERROR)
        from treadle_attention_xformers.backend import XformersAttention

        return XformersAttention(request)

    return Offer("xformers", SCORE, create, page_sizes=PAGE_SIZES, graph_safe=True)


def _reasons(request: AttentionRequest) -> list[str]:
    if request.device.kind != "cuda":  # nothing else about it would matter
        return [f"device {request.device.kind!r} is not CUDA"]
    capability = request.device.capability or (0, 0)
    checks = (
        (capability >= (8, 0), f"capability {'.'.join(map(str, capability))} is below 8.0"),
        (request.dtype in _DTYPES, f"dtype {request.dtype} is neither bfloat16 nor float16"),
        (
            request.kv_dtype in ("auto", request.dtype),
            f"kv_dtype {request.kv_dtype} is not {request.dtype}",
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
        (request.window is None, "sliding windows are not supported over pages"),
        (request.softcap is None, "a soft cap is not supported"),
        (not request.sinks, "attention sinks are not supported"),
        (not request.latent, "latent (MLA) caches are not supported"),
    )
    return request.contradictions() + [why for good, why in checks if not good] + _missing()


def _missing() -> list[str]:
    """What the installation lacks."""
    reasons = []
    xformers, triton, flash = (_version(name) for name in ("xformers", "triton", "flash_attn"))
    install = "pip install 'xformers>=0.0.35,<0.0.36'"
    if xformers is None:
        reasons.append(f"xformers is not installed: {install}")
    elif xformers != (0, 0, 35):
        reasons.append(f"xformers {_text(xformers)} is not 0.0.35: {install}")
    if triton is None:
        reasons.append("triton is not installed; torch for CUDA brings it")
    elif triton >= (3, 9):
        reasons.append(
            f"triton {_text(triton)} has no block pointers any more, which the kernels of xformers "
            "0.0.35 need; a torch before 2.15 brings an older triton"
        )
    if flash is not None and not (2, 7, 1) <= flash <= (2, 8, 4):
        reasons.append(
            f"xformers 0.0.35 cannot be imported beside flash_attn {_text(flash)}: uninstall it, "
            "or install 2.7.1 to 2.8.4"
        )
    return reasons


def _version(distribution: str) -> tuple[int, ...] | None:
    """The first three numbers of an installed version; an import would cost far more."""
    try:
        return tuple(map(int, re.findall(r"\d+", metadata.version(distribution))[:3]))
    except metadata.PackageNotFoundError:
        return None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
