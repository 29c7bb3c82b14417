"""What quantization plugins have in common: which layers they leave alone, and int4 on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from treadle.api.models import LinearSpec
from treadle.errors import UnsupportedModelError

__all__ = ("CpuInt4", "all_or_none", "is_layer_skipped")

log = logging.getLogger(__name__)


def is_layer_skipped(spec: LinearSpec, patterns: Iterable[str]) -> bool:
    """Whether a list such as ``modules_to_not_convert`` names a layer.

    A pattern names a module and all that is below it, by any run of whole components of its path:
    ``mlp.gate`` names ``model.layers.1.mlp.gate`` and not ``….mlp.gate_proj``; ``*`` stands for
    anything inside one component. A fused layer may be named by its own path or by those of its
    matrices. Raises ``UnsupportedModelError`` if only some of these are named.
    """
    components = [[c for c in pattern.split(".") if c] for pattern in patterns]
    patterns_parts = [parts for parts in components if parts]
    if _matches_any(spec.prefix, patterns_parts):
        return True
    return all_or_none(spec, lambda name: _matches_any(name, patterns_parts), "left unquantized")


def all_or_none(spec: LinearSpec, test: Callable[[str], bool], state: str) -> bool:
    """What ``test`` says of the matrices of a layer. ``UnsupportedModelError`` if they differ."""
    results = {name: test(name) for name in spec.names}
    if len(set(results.values())) > 1:
        matching = ", ".join(name for name, is_match in results.items() if is_match)
        remaining = ", ".join(name for name, is_match in results.items() if not is_match)
        raise UnsupportedModelError(
            f"the quantization_config says that {matching} is {state} and {remaining} is not, but "
            f"{spec.prefix} fuses them into one matrix; quantize them alike"
        )
    return all(results.values())


def _matches_any(name: str, patterns: list[list[str]]) -> bool:
    path = name.split(".")
    return any(
        all(fnmatchcase(c, p) for c, p in zip(path[first:], parts, strict=False))
        for parts in patterns
        for first in range(len(path) - len(parts) + 1)
    )


class CpuInt4(nn.Module):
    """``x @ W`` on a CPU for four-bit ``W``, by torch's own operator; a module of its layer.

    In bfloat16 it is faster than the unquantized product for few rows; in other types it is slower
    than to dequantize, so ``pack`` then answers ``None``. The operator computes
    ``(code - 8) · scale + offset``, where ``offset = (8 - zero) · scale`` is rounded to bfloat16.
    """

    def __init__(self, codes: Tensor, scales: Tensor, group: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.group = group

    @classmethod
    def pack(
        cls, codes: Tensor, scales: Tensor, zeros: Tensor, group: int, dtype: torch.dtype
    ) -> CpuInt4 | None:
        """``codes`` int ``[in, out]`` in 0 to 15, ``scales`` and ``zeros`` ``[in / group, out]``.

        ``None`` where the operator does not take the device, type or sizes, or does not exist.
        """
        is_supported = group in (32, 64, 128, 256) and codes.shape[1] % 16 == 0
        if codes.device.type != "cpu" or dtype is not torch.bfloat16 or not is_supported:
            return None
        offsets = (8 - zeros.float()) * scales.float()
        pairs = torch.stack([scales.float(), offsets], dim=-1).to(dtype).contiguous()
        try:
            packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                codes.t().to(torch.int32).contiguous(), 1
            )
            linear = cls(packed, pairs, group)
            linear(torch.zeros(1, codes.shape[0], dtype=dtype))
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            log.info("torch's int4 operator does not work here (%s); int4 is slower", error)
            return None
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.contiguous(), self.codes, self.group, self.scales
        )
        return y.view(*x.shape[:-1], y.shape[-1])
