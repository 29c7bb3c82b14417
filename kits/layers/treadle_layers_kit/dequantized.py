"""Linear layers whose weight stays as small as it is stored.

It is dequantized for each call, which is what every format computes by definition, on every device: the
reference of kernels, and what serves where there is none. On a CUDA device a format that can say what its
codes are is repacked for the kernels of ``packed_linear``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError
from treadle_layers_kit.packed import PackedWeight
from treadle_layers_kit.packed_layout import FP8, INT8, Levels, scales_in_float
from treadle_layers_kit.row_bytes import RowBytes
from treadle_layers_kit.row_int4 import RowInt4
from treadle_layers_kit.row_packing import ORDER, RowPacking, even_order
from treadle_layers_kit.weight import Shard, Sharded

__all__ = ("REPACKED", "DequantizedLinear", "local_groups", "replace_parameter", "scaled")

REPACKED = "repacked"
"""The name of the module that has the weight in the kernels' layout."""


class DequantizedLinear:
    """A ``LinearMethod``: subclasses register their parameters and say what the weight is."""

    prefix = ""
    dtype = torch.float32
    sizes: tuple[int, ...] = ()
    inputs = Shard.full(0)
    rounds_rows = True
    """See ``RowBytes.rounds_inputs``."""
    applies_packed_alone = True
    """Whether ``apply`` does nothing else where a packed weight is all that its module has."""

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        self.inputs = module.inputs if isinstance(module, Sharded) else Shard.full(spec.in_features)
        self.prefix, self.dtype, self.sizes = spec.prefix, spec.dtype, spec.out_features
        self.register(module, sum(spec.out_features))

    def register(self, module: nn.Module, out: int) -> None:
        """Register the parameters of ``out`` outputs and ``self.inputs``."""
        raise NotImplementedError

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Bring the loaded parameters into the form that ``dense`` reads."""

    def dense(self, module: Any) -> Tensor:
        """Return the weight: a new tensor, float32 ``[out, in]``."""
        raise NotImplementedError

    def repack(
        self,
        module: nn.Module,
        levels: Levels,
        rows: Callable[[int, int], Tensor],
        scales: Tensor,
        group: int,
        **steps: Tensor | None,
    ) -> None:
        """Put a ``PackedWeight`` in the place of the parameters, where kernels take the device and the groups, or a ``RowWeight``."""
        packing = RowPacking.of(module)
        packed: nn.Module | None
        if packing is not None and packing.by_rows:
            packed, order = self._by_rows(levels, rows, scales, group, **steps)
        else:
            order = None
            packed = PackedWeight.pack(
                rows, scales, group, self.inputs.size, self.dtype, levels, **steps
            )
        if packed is None:
            return
        for name in [
            *dict(module.named_parameters(recurse=False)),
            *dict(module.named_buffers(recurse=False)),
        ]:
            if name != "bias":
                delattr(module, name)
        module.add_module(REPACKED, packed)
        if order is not None:
            module.register_buffer(ORDER, order, persistent=False)

    def _by_rows(
        self,
        levels: Levels,
        rows: Callable[[int, int], Tensor],
        scales: Tensor,
        group: int,
        *,
        offsets: Tensor | None = None,
        factors: Tensor | None = None,
        index: Tensor | None = None,
    ) -> tuple[RowInt4 | RowBytes | None, Tensor | None]:
        """Return the weight, and the order of its inputs; nothing where groups have no one size, or numbers are no bytes."""
        order = None if index is None else even_order(index, group)
        is_even = index is None or order is not None
        if not is_even or self.inputs.size != group * scales.shape[1]:
            return None, None
        scales = scales_in_float(scales)
        if factors is not None:
            scales = scales * factors.view(-1, 1)

        def ordered(begin: int, end: int) -> Tensor:
            found = rows(begin, end)
            return found if order is None else found[:, order]

        if not isinstance(levels, str) and RowInt4.takes(self.inputs.size, group):
            return RowInt4.of_levels(ordered, levels, self.inputs.size, scales, offsets), order
        # Of FP4 the numbers are halves.
        if not isinstance(levels, str) and any(2 * n != round(2 * n) for n in levels):
            return None, None
        numbers = None
        if not isinstance(levels, str):
            is_half = any(n != round(n) for n in levels)
            numbers = torch.tensor([n * (1 + is_half) for n in levels]).to(torch.int8)
            scales = scales / (1 + is_half)

        def codes(begin: int, end: int) -> Tensor:
            found = ordered(begin, end)
            return found if numbers is None else numbers[found.long()]

        dtype = torch.float8_e4m3fn if levels == FP8 else torch.int8
        steps = self.inputs.size, scales, offsets
        packed = RowBytes.pack(codes, *steps, dtype=dtype, rounds_inputs=self.rounds_rows)
        return packed, order

    def repack_codes(
        self,
        module: nn.Module,
        bits: int,
        codes: Callable[[int, int], Tensor],
        scale: Tensor,
        zero: Tensor,
        group: int,
        index: Tensor | None = None,
    ) -> None:
        """``repack`` of ``(code - zero) · scale``, for codes from 0 on of up to four bits, or of eight.

        ``scale`` and ``zero`` are ``[out, groups]``. What is left of a zero point beside the middle of the codes
        becomes an offset.
        """
        middle = 1 << (bits - 1)
        offsets = (middle - zero) * scale.float() if bool((zero != middle).any()) else None
        levels: Levels = INT8 if bits == 8 else tuple(float(n - middle) for n in range(16))

        def rows(begin: int, end: int) -> Tensor:
            found = codes(begin, end)
            return (found.to(torch.int16) - middle).to(torch.int8) if bits == 8 else found

        self.repack(module, levels, rows, scale, group, offsets=offsets, index=index)

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        packed = module._modules.get(REPACKED)
        if packed is None:
            return F.linear(x, self.dense(module).to(x.dtype), bias)
        order = module._buffers.get(ORDER)
        y: Tensor = packed(x if order is None else x.index_select(-1, order))
        return y if bias is None else y + bias

    def check_groups(self, group: int) -> None:
        """Raise ``CheckpointError`` if groups of this size do not divide the inputs."""
        if self.inputs.total % group:
            raise CheckpointError(
                f"{self.prefix} has {self.inputs.total} input features, which groups of {group} do "
                "not divide; check group_size in quantization_config"
            )

    def local(self, scale: Tensor, group: int) -> tuple[Tensor, int]:
        """Return ``local_groups`` of this rank's inputs."""
        return local_groups(scale, group, self.inputs.start, self.inputs.size)

    def expand(self, per_matrix: Tensor) -> Tensor:
        """Return ``[matrices]`` as ``[out, 1]``: each output has the number of its matrix."""
        parts = zip(per_matrix, self.sizes, strict=True)
        return torch.cat([value.expand(size) for value, size in parts])[:, None].contiguous()


def local_groups(scale: Tensor, group: int, first: int, inputs: int) -> tuple[Tensor, int]:
    """Return the columns of ``scale`` ``[out, groups]`` for one rank's inputs, and their group size.

    Where its share begins inside a group, smaller groups of equal scales are exact.
    """
    step = gcd(group, first) if first % group else group
    begin, count = first // step, -(-inputs // step)
    spread = scale.repeat_interleave(group // step, dim=1) if step < group else scale
    return spread[:, begin : begin + count].contiguous(), min(step, inputs)


def scaled(values: Tensor, scale: Tensor, step: int, zeros: Tensor | None = None) -> Tensor:
    """Return ``(values - zeros) · scale`` in place; these are ``[out, groups]`` of ``step`` inputs."""
    inputs = values.shape[1]
    if inputs % step:
        scale = scale.repeat_interleave(step, dim=1)[:, :inputs]
        if zeros is not None:
            values.sub_(zeros.repeat_interleave(step, dim=1)[:, :inputs])
        return values.mul_(scale)
    groups = values.unflatten(1, (-1, step))
    if zeros is not None:
        groups.sub_(zeros[..., None])
    return torch.flatten(groups.mul_(scale[..., None]), 1)


def replace_parameter(module: nn.Module, name: str, data: Tensor) -> None:
    """Put ``data`` in the place of a parameter; a parameter, so that it counts as weights."""
    if name in module._parameters:
        delattr(module, name)
    module.register_parameter(name, nn.Parameter(data, requires_grad=False))
