"""Attention with torch's own operations: the offer. torch is imported when the backend is created."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.api.attention import AttentionOffer, AttentionRequest, MaskKind, Refusal
from treadle.api.hookspecs import Options, impl

if TYPE_CHECKING:
    from treadle.api.attention import AttentionBackend

__all__ = ("treadle_attention_backend",)

_DTYPES = ("float32", "bfloat16", "float16")
_FP8 = ("fp8_e4m3", "fp8_e5m2")
_PAGE_SIZES = (16, 32, 64, 128, 256, 8, 4, 2, 1)
_SCORES = {"cpu": 50, "cuda": 10}
_MASKS = (MaskKind.CAUSAL, MaskKind.SLIDING, MaskKind.BIDIRECTIONAL)


@impl
def treadle_attention_backend(
    request: AttentionRequest, options: Options
) -> AttentionOffer | Refusal:
    """Offer torch's own operations: the best choice on a CPU, the last on CUDA."""
    reasons = tuple(_refusal_reasons(request))
    if reasons:
        return Refusal("sdpa", reasons)

    def create() -> AttentionBackend:
        from treadle_sdpa.sdpa import SdpaAttention

        return SdpaAttention(request)

    # A gather copies whole tokens, so any page size works; small pages waste the least.
    sizes = _PAGE_SIZES if request.page_size in (None, *_PAGE_SIZES) else (request.page_size,)
    return AttentionOffer("sdpa", _SCORES[request.device.type], create, page_sizes=sizes)


def _refusal_reasons(request: AttentionRequest) -> list[str]:
    kv_dtype = request.dtype if request.kv_dtype == "auto" else request.kv_dtype
    checks = (
        (
            request.device.type in _SCORES,
            f"device {request.device.type!r} is not supported (cpu, cuda)",
        ),
        (
            request.dtype in _DTYPES,
            f"dtype {request.dtype} is not supported ({', '.join(_DTYPES)})",
        ),
        (
            kv_dtype == request.dtype or kv_dtype in _FP8,
            f"kv_dtype {kv_dtype} is neither {request.dtype} nor one of {', '.join(_FP8)}",
        ),
        (request.mask in _MASKS, f"mask {request.mask.value} is not supported"),
        (
            request.page_size is None or request.page_size > 0,
            f"page size {request.page_size} is not positive",
        ),
        (not request.latent, "latent (MLA) caches are not supported"),
    )
    return request.invalid_reasons() + [reason for is_met, reason in checks if not is_met]
