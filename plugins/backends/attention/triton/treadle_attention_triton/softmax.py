"""The arithmetic that decode and prefill share: the online softmax of FlashAttention (Dao et al.,
2022, arXiv:2205.14135), in base 2 because the hardware's exponential is."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ("accumulate", "cast_query", "first_softmax", "softcap_tanh")


@triton.jit
def first_softmax(sinks, q_head, has_sink, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The largest logit, in units of log2, and the sum of weights before any key: those of the sink
    where ``has_sink``, which only the program of a row's first keys counts."""
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        m_i = tl.where(has_sink, tl.load(sinks + q_head) * 1.4426950408889634, m_i)
        l_i = tl.where(has_sink, 1.0, l_i)
    return m_i, l_i


@triton.jit
def cast_query(query, FP8_CACHE: tl.constexpr):
    """``query`` in the type that products with an fp8 cache are made in: float16.

    The hardware turns fp8 into float16 in one instruction, into bfloat16 in several, and float16
    holds every fp8 value. A query beyond its range saturates; normalised ones never come near.
    """
    if FP8_CACHE:
        query = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return query


@triton.jit
def softcap_tanh(qk, scale, softcap):
    """``tanh(qk * scale / softcap)``; times ``softcap`` it is the capped score."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1): right at both infinities.
    exp_2x = tl.exp2(qk * (scale / softcap * 2.885390081777927))
    return 1.0 - 2.0 / (exp_2x + 1.0)


@triton.jit
def accumulate(acc, m_i, l_i, qk, v, qk_scale, INPUT_PRECISION: tl.constexpr):
    """Add one tile: ``qk`` [m, n], -inf where hidden; ``v`` [n, d].

    ``qk * qk_scale`` is in units of log2; ``m_i`` is the largest so far, ``l_i`` the sum of
    weights relative to it. Scaling after the maximum makes it one multiply-add per score.
    """
    m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
    # A row that has seen nothing yet has -inf everywhere; -inf - -inf would be NaN.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(qk * qk_scale - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=INPUT_PRECISION)
    return acc, m_new, l_i
