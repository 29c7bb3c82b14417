"""Quantized checkpoints in their published formats, packed here by the formats' own rules.

A ``Format`` quantizes by rounding to the nearest: what a real quantizer does better changes the
numbers, not how they are stored. Each also says what its numbers mean, so that a plugin can be
compared with the same model in full precision. Nothing here is shared with the plugins.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

__all__ = ("AwqFormat", "Format", "Fp8Format", "GptqFormat", "Packed", "pack_checkpoint")


@dataclass(frozen=True)
class Packed:
    """One matrix: its checkpoint tensors by last name component, and what they mean."""

    tensors: Mapping[str, Tensor]
    weight: Tensor  # float32 [out, in]


class Format(Protocol):
    """How a checkpoint stores quantized matrices."""

    optional: Sequence[str]
    """Tensors that checkpoints may lack."""

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        """The ``quantization_config``; ``unquantized`` are names of modules that are left alone."""

    def pack(self, weight: Tensor) -> Packed:
        """Quantize float32 ``[out, in]``."""


@dataclass(frozen=True)
class AwqFormat:
    """AutoAWQ's ``gemm`` packing: words along the outputs, whose nibbles are interleaved."""

    group_size: int = 32
    extra: Mapping[str, Any] = field(default_factory=dict)
    optional: Sequence[str] = ()

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group_size,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": list(unquantized) or None,
            **self.extra,
        }

    def pack(self, weight: Tensor) -> Packed:
        group = self.group_size if self.group_size > 0 else weight.shape[1]
        group_ids = torch.arange(weight.shape[1]) // group
        codes, scales, zeros = _round_asymmetric(weight.t(), group_ids, 4)
        tensors = {
            "qweight": _words_awq(codes),
            "qzeros": _words_awq(zeros),
            "scales": scales.half(),
        }
        return Packed(tensors, ((codes - zeros[group_ids]) * scales[group_ids]).t().contiguous())


def _words_awq(codes: Tensor) -> Tensor:
    """``[rows, columns]`` to int32 ``[rows, columns / 8]``."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for position, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].long() << (4 * position)
    return words.to(torch.int32)


@dataclass(frozen=True)
class GptqFormat:
    """AutoGPTQ's packing: weights in words along the inputs, zero points along the outputs."""

    bits: int = 4
    group_size: int = 32
    sym: bool = True
    desc_act: bool = False
    version: Literal[1, 2] = 1
    with_g_idx: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def optional(self) -> Sequence[str]:
        return () if self.desc_act else ("g_idx",)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.desc_act,
            "sym": self.sym,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "dynamic": {f"-:.*{name}": {} for name in unquantized},
            **self.extra,
        }

    def pack(self, weight: Tensor) -> Packed:
        inputs = weight.shape[1]
        group = self.group_size if self.group_size > 0 else inputs
        group_ids = torch.arange(inputs) // group
        if self.desc_act:
            # By the activations, which matrices that share their inputs share too.
            group_ids = group_ids[
                torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
            ]
        rounding = _round_symmetric if self.sym else _round_asymmetric
        codes, scales, zeros = rounding(weight.t(), group_ids, self.bits)
        tensors = {
            "qweight": _words(codes.t(), self.bits).t().contiguous(),
            "qzeros": _words(zeros, self.bits),
            "scales": scales.half(),
            "g_idx": group_ids.to(torch.int32),
        }
        if self.version == 1 and self.bits == 3:
            tensors["qzeros"] = _words((zeros - 1).long() & 7, 3)  # these do not fit into one word
        elif self.version == 1:
            ones = sum(1 << shift for shift in range(0, 32, self.bits))
            tensors["qzeros"] = (tensors["qzeros"].long() - ones).to(torch.int32)
        if not self.with_g_idx:
            del tensors["g_idx"]
        return Packed(tensors, ((codes - zeros[group_ids]) * scales[group_ids]).t().contiguous())


def _words(codes: Tensor, bits: int) -> Tensor:
    """``[rows, columns]`` to int32 ``[rows, columns · bits / 32]``, the first in the lowest bits."""
    period = 32 if bits == 3 else 32 // bits
    span = period * bits // 32
    words = torch.zeros(codes.shape[0], codes.shape[1] // period * span, dtype=torch.int64)
    for position in range(period):
        word, shift = divmod(bits * position, 32)
        placed = codes[:, position::period].long() << shift
        words[:, word::span] |= placed & 0xFFFFFFFF
        if shift + bits > 32:
            words[:, word + 1 :: span] |= placed >> 32
    return words.to(torch.int32)


def _round_asymmetric(
    weight: Tensor, group_ids: Tensor, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[in, out]``, and scales and zero points ``[groups, out]``, of ``[in, out]``."""
    top, groups = (1 << bits) - 1, int(group_ids.max()) + 1
    rows = [weight[group_ids == g] for g in range(groups)]
    low = torch.stack([r.amin(dim=0) for r in rows]).clamp_max(0)
    high = torch.stack([r.amax(dim=0) for r in rows]).clamp_min(0)
    scales = ((high - low) / top).half().float().clamp_min(1e-6)
    zeros = (-low / scales).round().clamp(0, top)
    codes = ((weight / scales[group_ids]).round() + zeros[group_ids]).clamp(0, top)
    return codes, scales, zeros


def _round_symmetric(weight: Tensor, group_ids: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    middle, groups = 1 << (bits - 1), int(group_ids.max()) + 1
    max_abs = torch.stack([weight[group_ids == g].abs().amax(dim=0) for g in range(groups)])
    scales = (max_abs / max(1, middle - 1)).half().float().clamp_min(1e-6)
    codes = ((weight / scales[group_ids]).round() + middle).clamp(0, 2 * middle - 1)
    return codes, scales, torch.full_like(scales, middle)


@dataclass(frozen=True)
class Fp8Format:
    """float8_e4m3fn: a scale for each matrix, output or block. ``static`` adds ``input_scale``."""

    scales: Literal["matrix", "channel", "block"] = "matrix"
    static: bool = False
    block: tuple[int, int] = (128, 128)
    scale_name: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    optional: Sequence[str] = ()

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        if self.scales == "channel":
            config: dict[str, Any] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
        else:
            scheme = "static" if self.static else "dynamic"
            config = {"quant_method": "fp8", "activation_scheme": scheme, "fmt": "e4m3"}
        if self.scales == "block":
            config["weight_block_size"] = list(self.block)
        return {**config, "modules_to_not_convert": list(unquantized), **self.extra}

    def pack(self, weight: Tensor) -> Packed:
        block_rows, block_columns = self._sizes(weight)
        scale = torch.stack(
            [
                torch.stack(
                    [piece.abs().amax() / 448.0 for piece in rows.split(block_columns, dim=1)]
                )
                for rows in weight.split(block_rows)
            ]
        )
        spread = scale.repeat_interleave(block_rows, 0).repeat_interleave(block_columns, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        default_name = "weight_scale_inv" if self.scales == "block" else "weight_scale"
        stored_scale = scale.reshape(()) if self.scales == "matrix" else scale
        tensors = {"weight": codes, self.scale_name or default_name: stored_scale}
        if self.static:
            tensors["input_scale"] = torch.tensor(0.02)
        return Packed(tensors, codes.float() * spread)

    def _sizes(self, weight: Tensor) -> tuple[int, int]:
        outputs, inputs = weight.shape
        sizes = {"matrix": (outputs, inputs), "channel": (1, inputs), "block": self.block}
        return sizes[self.scales]


def pack_checkpoint(
    source: Path,
    quantized_folder: Path,
    reference_folder: Path,
    format: Format,
    unquantized: Sequence[str] = (),
) -> None:
    """Write a checkpoint with quantized layers, and the same model with dequantized weights.

    ``quantized_folder`` gets the quantized checkpoint, ``reference_folder`` the same model in full
    precision. Layers whose names end in one of ``unquantized``, embeddings and the head stay as they are.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, quantized_folder)
    shutil.copytree(source, reference_folder)
    tensors = load_file(source / "model.safetensors")
    packed_tensors: dict[str, Tensor] = {}
    plain_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        is_layer_weight = ".layers." in name and leaf == "weight" and tensor.dim() == 2
        if not is_layer_weight or path.endswith(tuple(unquantized)):
            packed_tensors[name] = plain_tensors[name] = tensor
            continue
        packed_weight = format.pack(tensor.float())
        packed_tensors.update(
            {f"{path}.{part}": t.contiguous() for part, t in packed_weight.tensors.items()}
        )
        plain_tensors[name] = packed_weight.weight.to(tensor.dtype)
    save_file(packed_tensors, quantized_folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain_tensors, reference_folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = format.config(unquantized)
    (quantized_folder / "config.json").write_text(json.dumps(config))
