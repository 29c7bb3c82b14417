"""The linear layer of GPTQ checkpoints."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError, ConfigError
from treadle_gptq.config import Packing
from treadle_gptq.gemm import Gemm
from treadle_gptq.packing import (
    codes_of_words,
    codes_per_element,
    dequantize,
    pack_inputs,
    unpack_inputs,
    unpack_outputs,
)
from treadle_layers_kit import Shard, Sharded, empty_weight
from treadle_layers_kit.int4_packing import Int4Module, Int4Packing

__all__ = ("SPARE_BIAS", "GptqLinear")

SPARE_BIAS = "spare_bias"
"""The parameter that takes a bias which the checkpoint has and the model has not."""
COLUMNS = 1024
"""Outputs that are sorted at a time."""


class GptqLinear:
    """``x @ W.T + bias`` with ``W`` in ``bits``.

    With act-order, inputs belong to groups in any order. ``process_weights_after_loading`` sorts the rows of the weight by
    group, so that groups are runs again and the inputs are permuted instead. A rank that holds a
    share of the inputs holds some rows of every group: it keeps all scales and, where no sorting
    makes groups of equal size, the group of each row.

    Four bits are brought into the layout of whatever kernels there are for them (``Int4Packing``). Otherwise
    the weight stays as it is: few rows on a CUDA device go to a kernel of this format, and else it is
    dequantized for each call.
    """

    def __init__(
        self,
        packing: Packing,
        zero_offset: int,
        gemm: Gemm | None = None,
        cuda: bool = False,
        *,
        sym: bool = False,
    ) -> None:
        self.bits, self.group = packing.bits, packing.group_size
        self.act_order = packing.act_order
        self.zero_offset, self.sym = zero_offset, sym
        self.gemm, self.cuda = gemm, cuda
        self.int4: Int4Module | None = None

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        inputs = module.inputs if isinstance(module, Sharded) else Shard.full(spec.in_features)
        whole, block = codes_of_words(self.bits), codes_per_element(self.bits)
        for side, count in (
            ("input", spec.in_features),
            *(("output", n) for n in spec.out_features),
        ):
            if count % whole:
                raise ConfigError(
                    f"{spec.prefix} has {count} {side} features on each rank; GPTQ with "
                    f"{self.bits} bits packs {whole} into {'three words' if self.bits == 3 else 'one word'}, "
                    "so choose a smaller tensor_parallel_size"
                )
        if self.group == -1:
            self.group = inputs.total
        self.prefix, self.first = spec.prefix, inputs.start
        misfit = "has inputs in an order of its own (desc_act)" if self.act_order else ""
        if self.bits != 4:
            misfit = f"has weights in {self.bits} bits"
        self.packing = Int4Packing(
            module, spec.in_features, self.group, spec.dtype, cuda=self.cuda, misfit=misfit
        )
        out, groups = sum(spec.out_features), -(-inputs.total // self.group)
        shape = (int(spec.in_features / block), out)
        packed = empty_weight(shape, torch.int32, output_dim=1, input_dim=0, input_block=block)
        zeros = empty_weight(
            (groups, int(out / block)), torch.int32, output_dim=1, output_block=block
        )
        scales = empty_weight((groups, out), _scale_dtype(spec.dtype), output_dim=1)
        default_group = None if self.act_order else -1.0
        index = empty_weight((spec.in_features,), torch.int32, input_dim=0, default=default_group)
        module.register_parameter("qweight", packed)
        module.register_parameter("qzeros", zeros)
        module.register_parameter("scales", scales)
        module.register_parameter("g_idx", index)
        if not spec.bias:
            spare_bias = empty_weight((out,), spec.dtype, output_dim=0, default=0.0)
            module.register_parameter(SPARE_BIAS, spare_bias)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Bring the inputs into an order in which groups are runs, if there is one."""
        self._drop_spare_bias(module)
        qweight, scales = module.get_parameter("qweight").data, module.get_parameter("scales").data
        zeros = unpack_outputs(module.get_parameter("qzeros").data, self.bits, self.zero_offset)
        self._check_version(zeros)
        zeros = zeros.to(scales.dtype)
        index = self._index(module.get_parameter("g_idx").data, len(scales))
        del module.qweight, module.qzeros, module.scales, module.g_idx
        positions = torch.arange(len(index), device=index.device)
        order = torch.argsort(index, stable=True)
        if torch.equal(index, (self.first + positions) // self.group):
            scales, zeros = self._share(scales, zeros, len(index))
        elif torch.equal(index[order], positions // self.group):
            qweight = self._sorted(qweight, order)
            scales, zeros = self._share(scales, zeros, len(index), first=0)
            module.register_buffer("order", order, persistent=False)
        else:
            module.register_buffer("index", index, persistent=False)
        self._set_parameters(module, qweight, scales, zeros)

    def _check_version(self, zeros: Tensor) -> None:
        """Refuse zero points of the other version of the format, where symmetry tells what they are."""
        wrong = (1 << (self.bits - 1)) + (1 if self.zero_offset else -1)
        if self.sym and zeros.numel() and bool((zeros == wrong).all()):
            said, found = ("gptq", "gptq_v2") if self.zero_offset else ("gptq_v2", "gptq")
            raise CheckpointError(
                f"{self.prefix}.qzeros says that every zero point is {wrong}, but quantization_config "
                f"says sym, which is {1 << (self.bits - 1)}: checkpoint_format is {said!r} and the data are "
                f"{found!r}; correct checkpoint_format in config.json"
            )

    def _sorted(self, qweight: Tensor, order: Tensor) -> Tensor:
        # In pieces: unpacked, a weight is up to sixteen times as large.
        pieces = (unpack_inputs(piece, self.bits)[order] for piece in qweight.split(COLUMNS, dim=1))
        return torch.cat([pack_inputs(piece, self.bits) for piece in pieces], dim=1)

    def _drop_spare_bias(self, module: nn.Module) -> None:
        spare_bias = getattr(module, SPARE_BIAS, None)
        if spare_bias is None:
            return
        if spare_bias.any():
            raise CheckpointError(
                f"the checkpoint has a bias for {self.prefix}, which the model has not; check that "
                "config.json belongs to these weights (attention_bias, mlp_bias)"
            )
        delattr(module, SPARE_BIAS)

    def _index(self, g_idx: Tensor, groups: int) -> Tensor:
        """int64 ``[in]``: the group of each input."""
        index = g_idx.long()
        # Absent, or dummy weights: then inputs are in order.
        if not len(index) or int(index.max()) < 0 or (groups > 1 and not index.any()):
            return (self.first + torch.arange(len(index), device=index.device)) // self.group
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise CheckpointError(
                f"g_idx of {self.prefix} names groups {int(index.min())} to {int(index.max())}, but "
                f"there are {groups} groups of {self.group}; check group_size in quantization_config"
            )
        return index

    def _share(
        self, scales: Tensor, zeros: Tensor, inputs: int, first: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The groups of this rank's inputs.

        Where its share begins or ends inside a group, smaller groups of equal scales are exact.
        """
        first = self.first if first is None else first
        group = gcd(self.group, first, inputs)
        repeats, begin, end = self.group // group, first // group, (first + inputs) // group
        self.group = group
        return (
            scales.repeat_interleave(repeats, dim=0)[begin:end].contiguous(),
            zeros.repeat_interleave(repeats, dim=0)[begin:end].contiguous(),
        )

    def _set_parameters(
        self, module: nn.Module, qweight: Tensor, scales: Tensor, zeros: Tensor
    ) -> None:
        # Parameters, so that they count where the weights are counted.
        if self.bits == 4 and not hasattr(module, "index"):
            self.int4 = self.packing.pack(
                lambda begin, end: unpack_inputs(qweight[:, begin:end], 4),
                scales, zeros, self.group, in_order=not hasattr(module, "order"),
            )  # fmt: skip
        if self.int4 is not None:
            module.add_module("int4", self.int4)
            return
        if scales.device.type == "cpu":
            scales, zeros = scales.float(), zeros.float()  # float16 is slow there
        module.register_parameter("qweight", nn.Parameter(qweight, requires_grad=False))
        module.register_parameter("scales", nn.Parameter(scales, requires_grad=False))
        module.register_parameter("zeros", nn.Parameter(zeros, requires_grad=False))

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        order, index = getattr(module, "order", None), getattr(module, "index", None)
        if order is not None:
            x = x.index_select(-1, order)
        if self.int4 is not None:
            y: Tensor = self.int4(x)
        else:
            weight_args = (
                module.qweight,
                module.scales,
                module.zeros,
                self.bits,
                self.group,
                index,
            )
            if self.gemm is not None and self.gemm.supports(x, self.bits, self.group, index):
                y = self.gemm(x, *weight_args)
            else:
                y = x @ dequantize(*weight_args, x.dtype)
        return y if bias is None else y + bias


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """float16, which is what the checkpoints have, unless the model computes in float32."""
    return torch.float32 if dtype is torch.float32 else torch.float16
