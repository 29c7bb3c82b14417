"""The arithmetic of the layers as plain functions of tensors.

Each function is a whole operation that a device-specific kernel can take the place of: a layer
keeps the function that it calls in an attribute ``op``. Sums over features are done in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = (
    "clamped_swiglu",
    "combine_experts",
    "fused_add_rms_norm",
    "rms_norm",
    "rotary",
    "rotate",
    "silu_and_mul",
    "topk_softmax",
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x², -1) + eps) · (weight + offset)``; ``weight`` is ``[x.shape[-1]]``."""
    if offset:
        # Gemma adds the offset in float32: 1 + w has too few bits for w in bfloat16.
        return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``. A kernel may overwrite both arguments."""
    residual = x + residual
    return rms_norm(residual, weight, eps, offset), residual


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of features of ``x [tokens, heads, head_size]``.

    ``cos`` and ``sin`` are ``[tokens, 1, rotary_size]`` with one value for each feature, and
    ``sin`` is negative where the partner is subtracted. A pair is ``(i, i + rotary_size / 2)``, or
    ``(2 i, 2 i + 1)`` when ``interleaved``. Features beyond ``rotary_size`` pass unchanged.
    """
    size = cos.shape[-1]
    x_rot = x if size == x.shape[-1] else x[..., :size]
    if interleaved:
        partner = x_rot.reshape(*x_rot.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partner = x_rot.roll(size // 2, -1)
    rotated = torch.addcmul(x_rot * cos, partner, sin)
    return rotated if x_rot is x else torch.cat((rotated, x[..., size:]), dim=-1)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; see ``rotate`` for the shapes. A kernel may overwrite both."""
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)


def silu_and_mul(x: Tensor) -> Tensor:  # [..., 2 · n] -> [..., n]
    """``silu(gate) · up`` of ``x = [gate, up]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:  # [..., 2 · n] -> [..., n]
    """``gate · sigmoid(alpha · gate) · (up + 1)`` of features that alternate, gate first.

    Gates are at most ``limit``, ``up`` between ``-limit`` and ``limit``.
    """
    gate = x[..., ::2].clamp(max=limit)
    up = x[..., 1::2].clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def topk_softmax(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of the softmax of each row of ``logits [rows, experts]``: float32 ``[rows, k]``, and which
    they are, int64. ``normalize`` makes those of a row sum to one."""
    scores = logits.float().softmax(dim=-1)
    weights, ids = scores.topk(k, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if normalize else weights), ids


def combine_experts(y: Tensor, weights: Tensor) -> Tensor:  # [rows, k, size] -> [rows, size]
    """The sum over ``k`` of ``y``, times float32 ``weights [rows, k]``, added up in float32."""
    return torch.einsum("rks,rk->rs", y.float(), weights).to(y.dtype)
