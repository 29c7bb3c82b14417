"""Matrices as bitsandbytes stores them, number by number, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from treadle_bitsandbytes.config import read_config
from treadle_bitsandbytes.loader import BitsAndBytesLoader

from treadle.testing.packing import Format, Packed

__all__ = ("FourBitFormat", "Int8Format", "as_loaded")

NF4 = [-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1]
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3]
LEVELS = {
    "nf4": torch.tensor(NF4),
    "fp4": torch.tensor([*FP4, *(-value for value in FP4)]) / 12,
}


class Stored:
    """Tensors in memory, as a loader of one file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        yield from ((n, t) for n, t in self._tensors.items() if should_load(n))

    def file_of(self, name: str) -> str:
        return "model.safetensors"


def as_loaded(format: Format, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint as the plugin's loader yields them."""
    loader = BitsAndBytesLoader(Stored(tensors), read_config(format.config()))
    return dict(loader.tensors(lambda _: True))


@dataclass(frozen=True)
class FourBitFormat:
    """Blocks through the whole matrix; ``double``: their largest numbers are quantized, too."""

    kind: str = "nf4"
    block: int = 64
    double: bool = False
    storage: torch.dtype = torch.uint8
    extra: Mapping[str, Any] = field(default_factory=dict)
    # Their absence has a test of its own, because their names have one more component.
    optional: Sequence[str] = (
        *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),
        *("bitsandbytes__nf4", "bitsandbytes__fp4"),
    )

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "_load_in_4bit": True,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": ["lm_head", *unquantized] if unquantized else None,
            **self.extra,
        }

    def pack(self, weight: Tensor) -> Packed:
        numbers, table = weight.flatten(), LEVELS[self.kind]
        absmax = torch.stack([piece.abs().amax() for piece in numbers.split(self.block)])
        state: dict[str, Any] = {
            "quant_type": self.kind,
            "blocksize": self.block,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        tensors = {"weight.quant_map": table.clone(), "weight.absmax": absmax}
        if self.double:
            offset = float(absmax.mean())
            map = torch.linspace(-1, 1, 256)
            apart = absmax - offset
            nested = torch.stack([piece.abs().amax() for piece in apart.split(256)])
            spread = nested.repeat_interleave(256)[: len(absmax)].clamp_min(1e-12)
            codes = (apart / spread)[:, None].sub(map).abs().argmin(1)
            absmax = map[codes] * spread + offset
            tensors |= {
                "weight.absmax": codes.to(torch.uint8),
                "weight.nested_absmax": nested,
                "weight.nested_quant_map": map,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        scales = absmax.repeat_interleave(self.block)[: len(numbers)]
        codes = (numbers / scales)[:, None].sub(table).abs().argmin(1).to(torch.uint8)
        text = json.dumps(state).encode()
        packed = (codes[::2] << 4 | codes[1::2]).view(self.storage)[:, None]
        tensors["weight"] = packed
        tensors[f"weight.quant_state.bitsandbytes__{self.kind}"] = torch.tensor(list(text)).to(
            torch.uint8
        )
        return Packed(tensors, (table[codes.int()] * scales).view(weight.shape))


@dataclass(frozen=True)
class Int8Format:
    """The weights of LLM.int8."""

    optional: Sequence[str] = ("weight_format",)

    def config(self, unquantized: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": ["lm_head", *unquantized] if unquantized else None,
        }

    def pack(self, weight: Tensor) -> Packed:
        largest = weight.abs().amax(dim=1)
        codes = (weight * (127 / largest)[:, None]).round().to(torch.int8)
        tensors = {
            "weight": codes,
            "SCB": largest,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return Packed(tensors, codes.float() * largest[:, None] / 127)
