"""Paged attention on CUDA: the offer. torch and Triton are imported when the backend is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.api import impl
from treadle.api.types import AttentionOffer, AttentionRequest, MaskKind, Refusal
from treadle_paged_attention_kit.limits import BackendLimits, refusal_reasons
from treadle_triton_kit.support import missing_triton

if TYPE_CHECKING:
    from treadle.api.types import AttentionBackend

__all__ = ("treadle_attention_backend",)

# The first is preferred: a tile of 64 tokens is then one page, whose number is one scalar load.
PAGE_SIZES = (64, 128, 256, 32, 16)
LIMITS = BackendLimits(
    dtypes=("bfloat16", "float16", "float32"),
    page_sizes=PAGE_SIZES,
    head_sizes=range(16, 257, 8),
    masks=(MaskKind.CAUSAL, MaskKind.SLIDING, MaskKind.BIDIRECTIONAL),
    fp8={"fp8_e4m3": (8, 9), "fp8_e5m2": (8, 0)},
    max_group=64,
    sinks=True,
)


@impl
def treadle_attention_backend(
    request: AttentionRequest, options: Mapping[str, Any]
) -> AttentionOffer | Refusal:
    """Offer for CUDA devices of capability 8.0 and later."""
    reasons = refusal_reasons(request, LIMITS)
    if request.device.type == "cuda":
        reasons += missing_triton()
    if reasons:
        return Refusal("triton", tuple(reasons))

    def create() -> AttentionBackend:
        from treadle_attention_triton.backend import create

        return create(request)

    return AttentionOffer("triton", 80, create, page_sizes=PAGE_SIZES, graph_safe=True)
