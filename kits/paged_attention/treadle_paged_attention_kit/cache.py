"""Element types of the paged cache, and writing keys and values to it with torch's operations.

A cache is ``[2, pages, page_size, kv_heads, head_size]``: keys, then values. Page 0 is the null
page, which padding refers to.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ("DTYPES", "is_fp8", "saturating_cast", "write_kv")

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def is_fp8(dtype: torch.dtype) -> bool:
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as ``dtype``. Saturates for fp8: a plain cast turns large values into NaN."""
    if x.dtype == dtype:
        return x
    if is_fp8(dtype):
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def write_kv(
    cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, scales: tuple[float, float] = (1.0, 1.0)
) -> None:
    """Store ``k`` and ``v`` (``[tokens, kv_heads, head_size]``), divided by ``scales``.

    ``slots`` is the slot mapping, int64 ``[tokens]``.
    """
    _, pages, page_size, heads, size = cache.shape
    table = cache.view(2, pages * page_size, heads * size)
    if scales != (1.0, 1.0):
        k, v = k.float() / scales[0], v.float() / scales[1]
    k = saturating_cast(k, cache.dtype).reshape(-1, heads * size)
    v = saturating_cast(v, cache.dtype).reshape(-1, heads * size)
    if is_fp8(cache.dtype):  # index_copy_ does not support fp8, so copy bytes
        table, k, v = table.view(torch.uint8), k.view(torch.uint8), v.view(torch.uint8)
    table[0].index_copy_(0, slots, k)
    table[1].index_copy_(0, slots, v)
