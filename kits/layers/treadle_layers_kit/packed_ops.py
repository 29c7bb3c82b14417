"""The operations of linear layers whose weights are packed; see ``treadle_layers_kit.kernel_ops``."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Generator, Tensor

from treadle_layers_kit import ops
from treadle_layers_kit.expert_ops import example_scales, example_words
from treadle_layers_kit.int4_layout import int4_linear, pack_codes, pack_steps
from treadle_layers_kit.kernel_op import KernelOp, Sizes, scalar, tensor
from treadle_layers_kit.packed_layout import E2M1, packed_linear

__all__ = ("PACKED_OPS",)


def example_codes(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    shape = (sizes["in_features"], sizes["out_features"])
    return pack_codes(torch.randint(16, shape, generator=generator))


def example_steps(sizes: Sizes, dtype: torch.dtype, generator: Generator) -> Tensor:
    shape = (sizes["in_features"] // sizes["group"], sizes["out_features"])
    zeros = torch.randint(16, shape, generator=generator)
    return pack_steps(torch.rand(shape, generator=generator) / 64, zeros, dtype)


def gated(op: KernelOp) -> KernelOp:
    """``silu_and_mul`` of an operation."""

    def reference(*args: Any) -> Tensor:
        return ops.silu_and_mul(op.reference(*args))

    return replace(
        op,
        name=f"{op.name}_silu_and_mul",
        about=f"silu_and_mul of {op.name}, with the same arguments",
        used_by="GatedMLP.fused",
        returns=(tensor("y", "..., out_features / 2"),),
        reference=reference,
    )


INT4_LINEAR = KernelOp(
    name="int4_linear",
    about="""linear for a weight in four bits, (code - zero) · scale; group, a multiple of 32 that divides
    in_features, inputs share a zero and a scale. treadle_layers_kit.int4_layout has the layout of
    codes and steps; chunks is in_features / 128, rounded up.""",
    used_by="PackedInt4.op",
    args=(
        tensor("x", "..., in_features", strided=True),
        tensor("codes", "chunks, out_features, 32", dtype="int16"),
        tensor("steps", "in_features / group, out_features", dtype="int32"),
        scalar("in_features", "in_features"),
        scalar("group", "group"),
    ),
    returns=(tensor("y", "..., out_features"),),
    reference=int4_linear,
    example_sizes={"in_features": 4096, "out_features": 4096, "group": 128},
    small_sizes={"in_features": 256, "out_features": 64, "group": 128},
    examples={"codes": example_codes, "steps": example_steps},
    dtypes=("bfloat16", "float16"),
)

PACKED_LINEAR = KernelOp(
    name="packed_linear",
    about="""linear for a weight of 4 or 8 bits (bits), (number · scale + offset) · factor; group, a multiple of
    16, inputs share a scale and an offset. levels are the numbers of 4 bits, or int8 or float8_e4m3fn.
    treadle_layers_kit.packed_layout has the layout of codes and the types of scales and offsets.""",
    used_by="PackedWeight.op",
    args=(
        tensor("x", "..., in_features", strided=True),
        tensor("codes", "chunks, out_features, run", dtype="int16"),
        tensor("scales", "in_features / group, out_features", dtype="float16", optional=True),
        tensor("offsets", "in_features / group, out_features", dtype="float32", optional=True),
        tensor("factors", "out_features", dtype="float32", optional=True),
        scalar("levels"),
        scalar("in_features", "in_features"),
        scalar("group", "group"),
    ),
    returns=(tensor("y", "..., out_features"),),
    reference=packed_linear,
    example_sizes={"in_features": 4096, "out_features": 4096, "group": 32, "bits": 4},
    small_sizes={"in_features": 256, "out_features": 64, "group": 64, "bits": 4},
    examples={
        "codes": example_words,
        "scales": example_scales,
        "offsets": lambda *given: example_scales(*given).float(),
        "levels": lambda sizes, dtype, generator: E2M1,
    },
    dtypes=("bfloat16", "float16"),
)

PACKED_OPS: tuple[KernelOp, ...] = (
    INT4_LINEAR,
    gated(INT4_LINEAR),
    PACKED_LINEAR,
    gated(PACKED_LINEAR),
)
