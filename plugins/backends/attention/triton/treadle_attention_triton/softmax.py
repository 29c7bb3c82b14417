"""The arithmetic that decode and prefill share: the online softmax of FlashAttention (Dao et al.,
2022, arXiv:2205.14135), in base 2 because the hardware's exponential is."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ("accumulate", "capped", "for_products")


@triton.jit
def for_products(query, NARROW: tl.constexpr):
    """``query`` in the type that products with an fp8 cache are made in: float16.

    The hardware turns fp8 into float16 in one instruction, into bfloat16 in several, and float16
    holds every fp8 value. A query beyond its range saturates; normalised ones never come near.
    """
    if NARROW:
        query = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return query


@triton.jit
def capped(scores, scale, cap):
    """``tanh(scores * scale / cap)``; times ``cap`` it is the capped score."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both infinities.
    doubled = tl.exp2(scores * (scale / cap * 2.885390081777927))
    return 1.0 - 2.0 / (doubled + 1.0)


@triton.jit
def accumulate(acc, top, total, scores, values, scale, PRECISION: tl.constexpr):
    """Add one tile: ``scores`` [m, n], -inf where hidden; ``values`` [n, d].

    ``scores * scale`` is in units of log2; ``top`` is the largest so far, ``total`` the sum of
    weights relative to it. Scaling after the maximum makes it one multiply-add per score.
    """
    new = tl.maximum(top, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet has -inf everywhere; -inf - -inf would be NaN.
    safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, new, total
