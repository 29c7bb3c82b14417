"""The operations of mixtures of experts that kernel plugins may implement; see ``treadle_layers_kit.kernel_ops``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from treadle_layers_kit import ops
from treadle_layers_kit.kernel_op import Example, KernelOp, Sizes, scalar, tensor
from treadle_layers_kit.packed_experts import packed_experts
from treadle_layers_kit.packed_layout import E2M1, pack_words
from treadle_layers_kit.packed_order import NOWHERE, reorder_experts
from treadle_layers_kit.plain_experts import fused_experts

__all__ = ("EXPERT_OPS", "example_scales", "example_words")


def example_words(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    shape = (sizes["out_features"], sizes["in_features"])
    return pack_words(torch.randint(16, shape, generator=generator), E2M1, 32)


def example_scales(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    shape = (sizes["in_features"] // sizes["group"], sizes["out_features"])
    return (torch.rand(shape, generator=generator) / 64).half()


def of_experts(example: Callable[[Sizes, torch.dtype, Generator], Tensor]) -> Example:
    """Examples of as many experts."""

    def stacked(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
        return torch.stack([example(sizes, dtype, generator) for _ in range(sizes["experts"])])

    return stacked


def example_choices(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.rand(sizes["rows"], sizes["experts"], generator=generator).topk(2).indices


def example_order(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Each expert has one of its own, and places without an input."""
    orders = [torch.randperm(sizes["places"], generator=generator) for _ in range(sizes["experts"])]
    return (
        torch.stack(orders).masked_fill_(torch.stack(orders) >= sizes["in_features"], NOWHERE).int()
    )


def example_logits(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    """No two of a row are the same in any type."""
    orders = [torch.randperm(sizes["experts"], generator=generator) for _ in range(sizes["rows"])]
    return (torch.stack(orders) / 8 - 1).to(dtype)


EXPERT_OPS: tuple[KernelOp, ...] = (
    KernelOp(
        name="topk_softmax",
        about="""The k largest of the softmax over all experts, and which they are; if normalize, those of a row sum to
        one. Among equal ones any may be taken; ids are of experts also where logits are NaN.""",
        used_by="MoE.op",
        args=(
            tensor("logits", "rows, experts", strided=True),
            scalar("k", "k"),
            scalar("normalize", 1.0),
        ),
        returns=(
            tensor("weights", "rows, k", dtype="float32"),
            tensor("ids", "rows, k", dtype="int64"),
        ),
        reference=ops.topk_softmax,
        example_sizes={"experts": 128, "k": 8},
        small_sizes={"experts": 12, "k": 3},
        examples={"logits": example_logits},
    ),
    KernelOp(
        name="combine_experts",
        about="The sum over k of y times weights, added up in float32",
        used_by="Experts.combine_op",
        args=(tensor("y", "rows, k, size"), tensor("weights", "rows, k", dtype="float32")),
        returns=(tensor("total", "rows, size"),),
        reference=ops.combine_experts,
        example_sizes={"size": 4096, "k": 8},
        small_sizes={"size": 72, "k": 3},
    ),
    KernelOp(
        name="clamped_swiglu",
        about="""gate · sigmoid(alpha · gate) · (up + 1) of features that alternate, gate first; gates are at most limit,
        up between -limit and limit""",
        used_by="ClampedSwiGLU.op",
        args=(
            tensor("x", "..., 2 * size", strided=True),
            scalar("alpha", 1.702),
            scalar("limit", 7.0),
        ),
        returns=(tensor("y", "..., size"),),
        reference=ops.clamped_swiglu,
        example_sizes={"size": 2880},
        small_sizes={"size": 72},
    ),
    KernelOp(
        name="fused_experts",
        about="""For each choice of an expert, down of the activation of gate_up of its token's row, with the expert's matrices and
        biases: row i of y is that of choice i. All choices of a token differ. The activation halves the features.""",
        used_by="Experts.fused_op",
        args=(
            tensor("x", "rows, in_features"),
            tensor("topk_ids", "rows, k", dtype="int64"),
            tensor("gate_up", "experts, 2 * intermediate_size, in_features"),
            tensor("down", "experts, in_features, intermediate_size"),
            tensor("gate_up_bias", "experts, 2 * intermediate_size", optional=True),
            tensor("down_bias", "experts, in_features", optional=True),
            scalar("activation"),
        ),
        returns=(tensor("y", "rows * k, in_features"),),
        reference=fused_experts,
        example_sizes={"in_features": 2048, "intermediate_size": 768, "experts": 128},
        small_sizes={"in_features": 72, "intermediate_size": 40, "experts": 4},
        examples={
            "topk_ids": example_choices,
            "activation": lambda sizes, dtype, generator: ops.silu_and_mul,
        },
        dtypes=("bfloat16", "float16"),
    ),
    KernelOp(
        name="reorder_experts",
        about="""For each choice of an expert, the features of its token's row in the order of the expert: feature order[expert, i]
        is in place i, and zero where order is in_features or more. x has a row for each token or for each choice.""",
        used_by="PackedExperts.reorder_op",
        args=(
            tensor("x", "rows, in_features", strided=True),
            tensor("topk_ids", "rows, k", dtype="int64"),
            tensor("order", "experts, places", dtype="int32"),
        ),
        returns=(tensor("y", "rows * k, places", exact=True),),
        reference=reorder_experts,
        example_sizes={"in_features": 4096, "places": 4096, "experts": 8},
        small_sizes={"in_features": 90, "places": 96, "experts": 4},
        examples={"topk_ids": example_choices, "order": example_order},
    ),
    KernelOp(
        name="packed_experts",
        about="""For each choice of an expert, packed_linear of its token's row with the expert's weight: row i of y
        is that of choice i, and x has a row for each token or for each choice. All choices of a token differ.
        bias is added to it.""",
        used_by="PackedExperts.op",
        args=(
            tensor("x", "rows, in_features"),
            tensor("topk_ids", "rows, k", dtype="int64"),
            tensor("codes", "experts, chunks, out_features, run", dtype="int16"),
            tensor(
                "scales",
                "experts, in_features / group, out_features",
                dtype="float16",
                optional=True,
            ),
            tensor(
                "offsets",
                "experts, in_features / group, out_features",
                dtype="float32",
                optional=True,
            ),
            tensor("factors", "experts, out_features", dtype="float32", optional=True),
            scalar("levels"),
            scalar("in_features", "in_features"),
            scalar("group", "group"),
            tensor("bias", "experts, out_features", optional=True),
        ),
        returns=(tensor("y", "rows * k, out_features"),),
        reference=packed_experts,
        example_sizes={
            "in_features": 4096,
            "out_features": 28672,
            "experts": 8,
            "group": 32,
            "bits": 4,
        },
        small_sizes={"in_features": 256, "out_features": 64, "experts": 4, "group": 64, "bits": 4},
        examples={
            "topk_ids": example_choices,
            "codes": of_experts(example_words),
            "scales": of_experts(example_scales),
            "offsets": of_experts(lambda *given: example_scales(*given).float()),
            "levels": lambda sizes, dtype, generator: E2M1,
        },
        dtypes=("bfloat16", "float16"),
    ),
)
