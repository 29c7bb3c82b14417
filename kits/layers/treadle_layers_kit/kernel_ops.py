"""The operations of the layers that kernel plugins may implement (``treadle_kernel_op``).

Tensors are in the model's dtype unless it is stated; ``rows`` is any number of tokens. Where a layer
uses which operation is said by its sites (``treadle_layers_kit.fusion``). The sampler's operations are
declared in ``treadle.testing.kernel_ops``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.api.communicators import Communicator
from treadle_layers_kit import ops
from treadle_layers_kit.expert_ops import EXPERT_OPS
from treadle_layers_kit.kernel_op import KernelOp, scalar, tensor
from treadle_layers_kit.packed_ops import PACKED_OPS

__all__ = ("ALL_GATHER", "ALL_REDUCE_ADD_RMS_NORM", "COMMUNICATOR_OPS", "LAYER_OPS")

Norms = tuple[Tensor, Tensor, float, float]


def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``silu_and_mul`` of a linear layer."""
    return ops.silu_and_mul(F.linear(x, weight, bias))


def fused_add_partials_rms_norm(
    partials: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """``fused_add_rms_norm`` of the sum of ``partials``, rounded to the dtype of ``residual``."""
    total = partials.sum(0).to(residual.dtype)
    return ops.fused_add_rms_norm(total, residual, weight, eps, offset)


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: Norms | None,
    cache: Tensor,
    slots: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Normalise and rotate queries and keys, write keys and values, return the queries."""
    size, kv_heads = cos.shape[-1], cache.shape[2]
    q, k, v = qkv.unflatten(1, (-1, size)).tensor_split([-2 * kv_heads, -kv_heads], 1)
    if norms is not None:
        q_weight, k_weight, eps, offset = norms
        q, k = ops.rms_norm(q, q_weight, eps, offset), ops.rms_norm(k, k_weight, eps, offset)
    q, k = ops.rotary(q, k, cos, sin)
    is_stored = slots >= 0
    for kv_cache, x, scale in zip(cache, (k, v), scales, strict=True):
        rows = x[is_stored]
        if cache.dtype.itemsize == 1:
            limit = torch.finfo(cache.dtype).max
            rows = (rows.float() / scale).clamp(-limit, limit)
        kv_cache[slots[is_stored]] = rows.to(cache.dtype)
    return q


def all_reduce_add_rms_norm(
    communicator: Communicator,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """``fused_add_rms_norm`` of the sum of ``x`` over the ranks."""
    return ops.fused_add_rms_norm(communicator.all_reduce(x), residual, weight, eps, offset)


def all_gather(communicator: Communicator, x: Tensor) -> Tensor:
    """The ranks' columns, in rank order."""
    return communicator.all_gather(x)


# ------------------------------------------------------------------------------------ declarations

EPS, OFFSET = scalar("eps", 1e-6), scalar("offset", 0.0)
WEIGHT = tensor("weight", "size")
RESIDUAL = tensor("residual", "rows, size", access="scratch")
NORMED = (tensor("y", "rows, size"), tensor("residual", "rows, size"))
LINEAR = (
    tensor("x", "..., in_features", strided=True),
    tensor("weight", "out_features, in_features"),
    tensor("bias", "out_features", optional=True),
)
ROPE = (
    tensor("qkv", "rows, heads * head_size + 2 * kv_heads * head_size"),
    tensor("cos", "rows, 1, head_size"),
    tensor("sin", "rows, 1, head_size"),
    scalar("norms", optional=True),
)
CACHE = "2, slots, kv_heads, head_size"
SLOTS = tensor("slots", "rows", dtype="int64")
QUERIES = (tensor("q", "rows, heads, head_size"),)
HIDDEN, HEADS = {"size": 4096}, {"heads": 32, "kv_heads": 8, "head_size": 128}
SMALL, SMALL_HEADS = {"size": 128}, {"heads": 4, "kv_heads": 2, "head_size": 64}
SMALL_LINEAR = {"in_features": 64, "out_features": 48}

LAYER_OPS: tuple[KernelOp, ...] = (
    KernelOp(
        name="rms_norm",
        about="x / sqrt(mean(x²) + eps) · (weight + offset)",
        used_by="RMSNorm.op",
        args=(tensor("x", "..., size", strided=True), WEIGHT, EPS, OFFSET),
        returns=(tensor("y", "..., size"),),
        reference=ops.rms_norm,
        example_sizes=HIDDEN,
        small_sizes=SMALL,
    ),
    KernelOp(
        name="fused_add_rms_norm",
        about="rms_norm of x + residual, and that sum",
        used_by="RMSNorm.add_op",
        args=(
            tensor("x", "rows, size", strided=True, access="scratch"),
            RESIDUAL,
            WEIGHT,
            EPS,
            OFFSET,
        ),
        returns=NORMED,
        reference=ops.fused_add_rms_norm,
        example_sizes=HIDDEN,
        small_sizes=SMALL,
    ),
    KernelOp(
        name="fused_add_partials_rms_norm",
        about="fused_add_rms_norm of the sum of the partials, rounded to the dtype first",
        used_by="RMSNorm.partials_op",
        args=(
            tensor("partials", "partials, rows, size", dtype="float32"),
            RESIDUAL,
            WEIGHT,
            EPS,
            OFFSET,
        ),
        returns=NORMED,
        reference=fused_add_partials_rms_norm,
        example_sizes=HIDDEN,
        small_sizes=SMALL,
    ),
    KernelOp(
        name="silu_and_mul",
        about="silu of the first half of x, times the second half",
        used_by="GatedMLP.op",
        args=(tensor("x", "..., 2 * size", strided=True),),
        returns=(tensor("y", "..., size"),),
        reference=ops.silu_and_mul,
        example_sizes={"size": 14336},
        small_sizes={"size": 96},
    ),
    KernelOp(
        name="rope_and_cache",
        about="""Normalises the heads of queries and keys (norms: q_weight, k_weight, eps, offset), rotates
        them as ops.rotary does, not interleaved, and writes keys and values of token t to cache[0] and
        cache[1] at slots[t], unless that is negative. Returns the queries.""",
        used_by="SelfAttention.fused",
        args=(*ROPE, tensor("cache", CACHE, access="write"), SLOTS),
        returns=QUERIES,
        reference=rope_and_cache,
        example_sizes=HEADS,
        small_sizes=SMALL_HEADS,
    ),
    KernelOp(
        name="rope_and_cache_fp8",
        about="""rope_and_cache for an fp8 cache: keys are divided by scales[0] and values by scales[1]
        (floats), and clamped to the largest number of the cache's type.""",
        used_by="SelfAttention.fused",
        args=(
            *ROPE,
            tensor("cache", CACHE, dtype="float8_e4m3fn", access="write"),
            SLOTS,
            scalar("scales"),
        ),
        returns=QUERIES,
        reference=rope_and_cache,
        example_sizes=HEADS,
        small_sizes=SMALL_HEADS,
    ),
    KernelOp(
        name="linear",
        about="torch.nn.functional.linear for any number of rows",
        used_by="PlainLinear.op",
        args=LINEAR,
        returns=(tensor("y", "..., out_features"),),
        reference=F.linear,
        example_sizes={"in_features": 4096, "out_features": 4096},
        small_sizes=SMALL_LINEAR,
    ),
    KernelOp(
        name="linear_split_k",
        about="linear for a result that is only read by a fused_add_partials_rms_norm or fused_add_rms_norm",
        used_by="PlainLinear.op",
        args=LINEAR,
        returns=(tensor("y", "..., out_features", partial=True),),
        reference=F.linear,
        example_sizes={"in_features": 14336, "out_features": 4096},
        small_sizes={"in_features": 2048, "out_features": 64},
    ),
    KernelOp(
        name="linear_silu_and_mul",
        about="silu_and_mul of linear",
        used_by="GatedMLP.fused",
        args=LINEAR,
        returns=(tensor("y", "..., out_features / 2"),),
        reference=linear_silu_and_mul,
        example_sizes={"in_features": 4096, "out_features": 28672},
        small_sizes={"in_features": 64, "out_features": 64},
    ),
    *PACKED_OPS,
    *EXPERT_OPS,
)

ALL_REDUCE_ADD_RMS_NORM = KernelOp(
    name="all_reduce_add_rms_norm",
    about="fused_add_rms_norm of the sum of x over the ranks, rounded to the dtype first",
    used_by="RMSNorm.all_reduce_op",
    args=(
        tensor("x", "rows, size"),
        tensor("residual", "rows, size", access="scratch"),
        tensor("weight", "size"),
        EPS,
        OFFSET,
    ),
    returns=(tensor("y", "rows, size"), tensor("residual", "rows, size", exact=True)),
    reference=all_reduce_add_rms_norm,
    example_sizes=HIDDEN,
    small_sizes=SMALL,
)

ALL_GATHER = KernelOp(
    name="all_gather",
    about="x of all ranks side by side, in rank order",
    used_by="LMHead.gather_op",
    args=(tensor("x", "rows, size", strided=True),),
    returns=(tensor("y", "rows, world_size * size", exact=True),),
    reference=all_gather,
    example_sizes={"size": 64128},
    small_sizes=SMALL,
)

COMMUNICATOR_OPS: tuple[KernelOp, ...] = (ALL_REDUCE_ADD_RMS_NORM, ALL_GATHER)
"""Operations between ranks, which a communicator may have (``SupportsFusedOps``). The reference gets a
communicator as its first argument. They are checked on all ranks before they are used."""
