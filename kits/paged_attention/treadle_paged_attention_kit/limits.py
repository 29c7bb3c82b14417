"""Which requests an attention backend serves, as data. Imports no torch, so that an offer may ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle.api.attention import AttentionRequest, MaskKind

__all__ = ("BackendLimits", "refusal_reasons")

Capability = tuple[int, int]
CAUSAL_ONLY = (MaskKind.CAUSAL,)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLimits:
    """What a backend on CUDA devices serves."""

    dtypes: Sequence[str]
    page_sizes: Sequence[int]
    head_sizes: Sequence[int]
    """A tuple, or a range with a step."""
    masks: Sequence[MaskKind] = CAUSAL_ONLY
    fp8: Mapping[str, Capability] = field(default_factory=dict)
    """Cache types in fp8, and the least capability of a device for each."""
    min_capability: Capability = (8, 0)
    max_group: int | None = None
    """How many query heads may share one key/value head; ``None``: any number."""
    window: bool = True
    softcap: bool = True
    sinks: bool = False


def refusal_reasons(request: AttentionRequest, limits: BackendLimits) -> list[str]:
    """Return every reason why a backend with these ``limits`` cannot serve ``request``."""
    if request.device.type != "cuda":  # on another device no other limit matters
        return [f"device {request.device.type!r} is not CUDA"]
    size, page_size, group = request.head_size, request.page_size, limits.max_group
    checks = (
        (request.dtype in limits.dtypes, f"dtype {request.dtype} is not {_one_of(limits.dtypes)}"),
        (
            size in limits.head_sizes,
            f"head size {size} is not {_one_of(limits.head_sizes)}",
        ),
        (
            group is None or request.num_heads <= group * max(request.num_kv_heads, 1),
            f"more than {group} query heads share one key/value head",
        ),
        (
            page_size is None or page_size in limits.page_sizes,
            f"page size {page_size} is not {_one_of(sorted(limits.page_sizes))}",
        ),
        (request.mask in limits.masks, f"mask {request.mask.value} is not supported"),
        (limits.window or request.window is None, "sliding windows are not supported"),
        (limits.softcap or request.softcap is None, "a soft cap is not supported"),
        (limits.sinks or not request.sinks, "attention sinks are not supported"),
        (not request.latent, "latent (MLA) caches are not supported"),
    )
    reasons = [*_device_reasons(request, limits), *_cache_reasons(request, limits)]
    return request.invalid_reasons() + reasons + [reason for is_met, reason in checks if not is_met]


def _device_reasons(request: AttentionRequest, limits: BackendLimits) -> list[str]:
    if _capability(request) >= limits.min_capability:
        return []
    return [f"capability {_text(_capability(request))} is below {_text(limits.min_capability)}"]


def _cache_reasons(request: AttentionRequest, limits: BackendLimits) -> list[str]:
    kv_dtype = request.dtype if request.kv_dtype == "auto" else request.kv_dtype
    if kv_dtype == request.dtype:
        return []
    if kv_dtype not in limits.fp8:
        allowed = f"neither {request.dtype} nor fp8" if limits.fp8 else f"not {request.dtype}"
        return [f"kv_dtype {kv_dtype} is {allowed}"]
    required = limits.fp8[kv_dtype]
    if limits.min_capability <= _capability(request) < required:
        actual = _text(_capability(request))
        return [f"{kv_dtype} needs capability {_text(required)}, this is {actual}"]
    return []


def _capability(request: AttentionRequest) -> Capability:
    return request.device.capability or (0, 0)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _one_of(values: Sequence[object]) -> str:
    if isinstance(values, range):
        return f"a multiple of {values.step} from {values[0]} to {values[-1]}"
    return f"one of {', '.join(map(str, values))}"
