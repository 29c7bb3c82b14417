"""Matrices as llm-compressor stores them, by the rules of its formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from treadle.testing.packing import Packed

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class IntFormat:
    """``pack-quantized``, or ``int-quantized`` where it is not ``packed``."""

    bits: int = 4
    strategy: str = "group"
    group_size: int = 32
    symmetric: bool = True
    packed: bool = True
    act_order: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def optional(self) -> Sequence[str]:
        return (
            ("weight_shape", "input_scale") if self.act_order else ("weight_shape", "weight_g_idx")
        )

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "strategy": self.strategy,
            "group_size": self.group_size if self.strategy == "group" else None,
            "symmetric": self.symmetric,
            "actorder": "group" if self.act_order else None,
        }
        format = "pack-quantized" if self.packed else "int-quantized"
        return config(weights, format, unquantized, self.extra)

    def pack(self, weight: Tensor) -> Packed:
        out, inputs = weight.shape
        group = self.group_size if self.strategy == "group" else inputs
        groups = torch.arange(inputs) // group
        if self.act_order:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        rows = [weight[:, groups == g] for g in range(int(groups.max()) + 1)]
        low = torch.stack([r.amin(dim=1) for r in rows], dim=1).clamp_max(0)
        high = torch.stack([r.amax(dim=1) for r in rows], dim=1).clamp_min(0)
        if self.strategy == "tensor":
            low, high = low.amin().expand_as(low), high.amax().expand_as(high)
        least, most = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        if self.symmetric:
            scale, zeros = torch.maximum(-low, high) / most, torch.zeros_like(low)
        else:
            scale = (high - low) / (most - least)
            zeros = (least - low / scale).round().clamp(least, most)
        codes = ((weight / scale[:, groups]).round() + zeros[:, groups]).clamp(least, most)
        tensors = {"weight_scale": scale}
        if self.strategy == "tensor":
            tensors = {"weight_scale": scale[:1, 0]}
        if self.packed:
            tensors["weight_packed"] = words(codes, self.bits)
            tensors["weight_shape"] = torch.tensor([out, inputs])
        else:
            tensors["weight"] = codes.to(torch.int8)
            tensors["input_scale"] = torch.ones(1)
        if not self.symmetric and self.packed:
            tensors["weight_zero_point"] = words(zeros.t(), self.bits).t().contiguous()
        elif not self.symmetric or not self.packed:
            stored = zeros.to(torch.int8)
            tensors["weight_zero_point"] = stored[:1, 0] if self.strategy == "tensor" else stored
        if self.act_order:
            tensors["weight_g_idx"] = groups.to(torch.int32)
        return Packed(tensors, (codes - zeros[:, groups]) * scale[:, groups])


@dataclass(frozen=True)
class UnpackedFormat(IntFormat):
    """int8 as it is; a symmetric matrix may have zero points of 0, which earlier versions wrote.

    ``inputs``: activations in int8, by their own scales or, if ``static``, by the checkpoint's.
    """

    bits: int = 8
    strategy: str = "channel"
    packed: bool = False
    inputs: Literal["symmetric", "asymmetric"] | None = None
    static: bool = False

    @property
    def optional(self) -> Sequence[str]:
        unread = () if self.static else ("input_scale",)
        return (*unread, "weight_zero_point") if self.symmetric else unread

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        whole = super().config(unquantized)
        if self.inputs is not None:
            whole["config_groups"]["group_0"]["input_activations"] = {
                "num_bits": 8,
                "type": "int",
                "strategy": "tensor" if self.static else "token",
                "dynamic": not self.static,
                "symmetric": self.inputs == "symmetric",
            }
        return whole

    def pack(self, weight: Tensor) -> Packed:
        packed = super().pack(weight)
        tensors = {**packed.tensors, "input_scale": torch.tensor([0.04])}
        if self.static and self.inputs == "asymmetric":
            tensors["input_zero_point"] = torch.tensor([5], dtype=torch.int8)
        return Packed(tensors, packed.weight)


@dataclass(frozen=True)
class FloatFormat:
    """``float-quantized``: float8_e4m3fn."""

    strategy: str = "tensor"
    block: tuple[int, int] = (64, 32)
    static: bool = False
    optional: Sequence[str] = ("input_scale",)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        weights = {"num_bits": 8, "type": "float", "strategy": self.strategy, "symmetric": True}
        if self.strategy == "block":
            weights["block_structure"] = list(self.block)
        return config(weights, "float-quantized", unquantized)

    def pack(self, weight: Tensor) -> Packed:
        out, inputs = weight.shape
        sizes = {"tensor": (out, inputs), "channel": (1, inputs), "block": self.block}
        rows, columns = sizes[self.strategy]
        scale = torch.stack(
            [
                torch.stack([piece.abs().amax() / 448 for piece in part.split(columns, dim=1)])
                for part in weight.split(rows)
            ]
        )
        spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:out, :inputs]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale[0] if rows == out else scale}
        if self.static:
            tensors["input_scale"] = torch.tensor([0.02])
        return Packed(tensors, codes.float() * spread)


@dataclass(frozen=True)
class Fp4Format:
    """``nvfp4-pack-quantized``, or ``mxfp4-pack-quantized`` with groups of 32."""

    group_size: int = 16
    optional: Sequence[str] = ("input_global_scale",)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        is_nv = self.group_size == 16
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group" if is_nv else "group",
            "group_size": self.group_size,
            "symmetric": True,
        }
        return config(weights, f"{'nv' if is_nv else 'mx'}fp4-pack-quantized", unquantized)

    def pack(self, weight: Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, self.group_size))
        largest = groups.abs().amax(dim=2)
        tensors: dict[str, Tensor] = {}
        if self.group_size == 16:
            total = 448 * 6 / weight.abs().amax()
            stored = (largest / 6 * total).to(torch.float8_e4m3fn)
            scale = stored.float() / total
            tensors = {"weight_scale": stored, "weight_global_scale": total.reshape(1)}
            tensors["input_global_scale"] = torch.ones(1)
        else:
            exponents = (largest / 6).log2().ceil()
            scale = exponents.exp2()
            tensors = {"weight_scale": (exponents + 127).to(torch.uint8)}
        values = groups / scale[..., None]
        places = (values.abs()[..., None] - FP4).abs().argmin(dim=-1)
        codes = (places + 8 * (values < 0)).flatten(1).to(torch.uint8)
        tensors["weight_packed"] = codes[:, ::2] | codes[:, 1::2] << 4
        signed = torch.where(values < 0, -FP4[places], FP4[places])
        return Packed(tensors, (signed * scale[..., None]).flatten(1))


def config(
    weights: Mapping[str, Any],
    format: str,
    unquantized: Sequence[str],
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    is_fp8 = (weights.get("type"), weights.get("num_bits")) == ("float", 8)
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": dict(weights)}
    group["input_activations"] = inputs if is_fp8 else None
    skipped = [name if name.startswith("model.") else f"re:.*{name}$" for name in unquantized]
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *skipped],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        **(extra or {}),
    }


def words(codes: Tensor, bits: int) -> Tensor:
    """``[rows, columns]`` from ``-2^(bits - 1)`` to int32 ``[rows, columns · bits / 32]``."""
    count, middle = 32 // bits, 1 << (bits - 1)
    packed = torch.zeros(len(codes), codes.shape[1] // count, dtype=torch.int64)
    for place in range(count):
        packed |= (codes[:, place::count].long() + middle) << (bits * place)
    return packed.to(torch.int32)
