"""Paged attention on CUDA: the bid. torch and Triton are imported when the backend is made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from treadle.api import impl
from treadle.api.types import AttentionRequest, MaskKind, Offer, Refusal

if TYPE_CHECKING:
    from treadle.api.types import AttentionBackend

__all__ = ("treadle_attention",)

# The first is preferred: a tile of 64 tokens is then one page, whose number is one scalar load.
PAGE_SIZES = (64, 128, 256, 32, 16)
_DTYPES = ("bfloat16", "float16", "float32")
_FP8 = {"fp8_e4m3": (8, 9), "fp8_e5m2": (8, 0)}
_MASKS = (MaskKind.CAUSAL, MaskKind.SLIDING, MaskKind.BIDIRECTIONAL)


@impl
def treadle_attention(request: AttentionRequest, options: Mapping[str, Any]) -> Offer | Refusal:
    """Offer for CUDA devices of capability 8.0 and later."""
    reasons = tuple(_reasons(request))
    if reasons:
        return Refusal("triton", reasons)

    def create() -> AttentionBackend:
        from treadle_attention_triton.backend import create

        return create(request)

    return Offer("triton", 80, create, page_sizes=PAGE_SIZES, graph_safe=True)


def _reasons(request: AttentionRequest) -> list[str]:
    if request.device.kind != "cuda":  # nothing else about it would matter
        return [f"device {request.device.kind!r} is not CUDA"]
    capability = request.device.capability or (0, 0)
    shown = ".".join(map(str, capability))
    kv_dtype = request.dtype if request.kv_dtype == "auto" else request.kv_dtype
    needed = _FP8.get(kv_dtype, (8, 0))
    size = request.head_size
    checks = (
        (capability >= (8, 0), f"capability {shown} is below 8.0"),
        (request.dtype in _DTYPES, f"dtype {request.dtype} is not supported"),
        (
            kv_dtype == request.dtype or kv_dtype in _FP8,
            f"kv_dtype {kv_dtype} is neither {request.dtype} nor fp8",
        ),
        (
            capability >= needed or capability < (8, 0),
            f"{kv_dtype} needs capability {needed[0]}.{needed[1]}, this is {shown}",
        ),
        (
            16 <= size <= 256 and size % 8 == 0,
            f"head size {size} is not a multiple of 8 from 16 to 256",
        ),
        (
            request.heads <= 64 * max(request.kv_heads, 1),
            "more than 64 query heads share one key/value head",
        ),
        (
            request.page_size in (None, *PAGE_SIZES),
            f"page size {request.page_size} is not one of {sorted(PAGE_SIZES)}",
        ),
        (request.mask in _MASKS, f"mask {request.mask.value} is not supported"),
        (not request.sinks, "attention sinks are not supported"),
        (not request.latent, "latent (MLA) caches are not supported"),
        (find_spec("triton") is not None, "triton is not installed; torch for CUDA brings it"),
    )
    return request.contradictions() + [why for good, why in checks if not good]
