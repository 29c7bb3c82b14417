"""Attention with xformers' operators: the offer. xformers is imported when the backend is created."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api import impl
from treadle.api.types import AttentionOffer, AttentionRequest, MaskKind, Refusal
from treadle_paged_attention_kit.limits import BackendLimits, refusal_reasons
from treadle_paged_attention_kit.versions import installed_version, version_text

if TYPE_CHECKING:
    from treadle.api.types import AttentionBackend

__all__ = ("treadle_attention_backend",)

SCORE = 40
"""Between plain torch on CUDA (10) and the Triton kernels (80), than which nobody measured it faster."""

# The split-K operator takes pages of whole tiles: 64 tokens, or 32 or 16 for smaller pages.
PAGE_SIZES = (64, 128, 256, 32, 16)
# The split-K operator's and FlashAttention's in common.
HEAD_SIZES = (16, 32, 64, 128, 256)
LIMITS = BackendLimits(
    dtypes=("bfloat16", "float16"),
    page_sizes=PAGE_SIZES,
    head_sizes=HEAD_SIZES,
    masks=(MaskKind.CAUSAL, MaskKind.BIDIRECTIONAL),
    window=False,
    softcap=False,
)


@impl
def treadle_attention_backend(
    request: AttentionRequest, options: Mapping[str, Any]
) -> AttentionOffer | Refusal:
    """Offer for CUDA devices of capability 8.0 and later, where xformers is installed."""
    reasons = refusal_reasons(request, LIMITS)
    if request.device.type == "cuda":
        reasons += _missing()
    if reasons:
        return Refusal("xformers", tuple(reasons))

    def create() -> AttentionBackend:
        # Its import warns that its C++ library cannot be loaded, which nothing here needs.
        logging.getLogger("xformers").setLevel(logging.ERROR)
        from treadle_attention_xformers.backend import XformersAttention

        return XformersAttention(request)

    return AttentionOffer("xformers", SCORE, create, page_sizes=PAGE_SIZES, graph_safe=True)


def _missing() -> list[str]:
    """Return what the installation lacks."""
    reasons = []
    xformers, triton, flash = (
        installed_version(name) for name in ("xformers", "triton", "flash_attn")
    )
    install = "pip install 'xformers>=0.0.35,<0.0.36'"
    if xformers is None:
        reasons.append(f"xformers is not installed: {install}")
    elif xformers != (0, 0, 35):
        reasons.append(f"xformers {version_text(xformers)} is not 0.0.35: {install}")
    if triton is None:
        reasons.append("triton is not installed; torch for CUDA brings it")
    elif triton >= (3, 9):
        reasons.append(
            f"triton {version_text(triton)} has no block pointers any more, which the kernels of xformers "
            "0.0.35 need; a torch before 2.15 brings an older triton"
        )
    if flash is not None and not (2, 7, 1) <= flash <= (2, 8, 4):
        reasons.append(
            f"xformers 0.0.35 cannot be imported beside flash_attn {version_text(flash)}: uninstall it, "
            "or install 2.7.1 to 2.8.4"
        )
    return reasons
