"""The linear layer of GPTQ checkpoints."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.models import LinearSpec
from treadle.errors import CheckpointError, ConfigError
from treadle_gptq.config import Packing
from treadle_gptq.packing import (
    codes_of_words,
    codes_per_element,
    dequantize,
    unpack_inputs,
    unpack_outputs,
)
from treadle_layers_kit import empty_weight
from treadle_layers_kit.dequantized import DequantizedLinear, replace_parameter
from treadle_layers_kit.int4_packing import Int4Module, Int4Packing
from treadle_layers_kit.row_packing import ORDER, even_order

__all__ = ("SPARE_BIAS", "GptqLinear")

SPARE_BIAS = "spare_bias"
"""The parameter that takes a bias which the checkpoint has and the model has not."""


class GptqLinear(DequantizedLinear):
    """``x @ W.T + bias`` with ``W`` in ``bits``.

    With act-order, inputs belong to groups in any order. For kernels, the rows of the weight are sorted by group, so that
    groups are runs again and the inputs are permuted instead. A rank that holds a share of the inputs holds
    some rows of every group, and all scales.

    Four bits are brought into the layout of whatever kernels there are for them (``Int4Packing``), all else into that
    of ``packed_linear``. Where there are none, the weight stays as it is and is dequantized for each call.
    """

    def __init__(
        self,
        packing: Packing,
        zero_offset: int,
        cuda: bool = False,
        *,
        sym: bool = False,
    ) -> None:
        self.bits, self.group = packing.bits, packing.group_size
        self.act_order = packing.act_order
        self.zero_offset, self.sym = zero_offset, sym
        self.cuda = cuda
        self.int4: Int4Module | None = None

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        super().create_weights(module, spec)
        if not spec.bias:
            shape = (sum(spec.out_features),)
            spare_bias = empty_weight(shape, spec.dtype, output_dim=0, default=0.0)
            module.register_parameter(SPARE_BIAS, spare_bias)

    def register(self, module: nn.Module, out: int) -> None:
        inputs, dtype = self.inputs, self.dtype
        whole, block = codes_of_words(self.bits), codes_per_element(self.bits)
        for side, count in ("input", inputs.size), *(("output", n) for n in self.sizes):
            if count % whole:
                raise ConfigError(
                    f"{self.prefix} has {count} {side} features on each rank; GPTQ with "
                    f"{self.bits} bits packs {whole} into {'three words' if self.bits == 3 else 'one word'}, "
                    "so choose a smaller tensor_parallel_size"
                )
        if self.group == -1:
            self.group = inputs.total
        self.packing = Int4Packing(module, inputs.size, self.group, dtype, cuda=self.cuda)
        groups = -(-inputs.total // self.group)
        shape = (int(inputs.size / block), out)
        packed = empty_weight(shape, torch.int32, output_dim=1, input_dim=0, input_block=block)
        zeros = empty_weight(
            (groups, int(out / block)), torch.int32, output_dim=1, output_block=block
        )
        scales = empty_weight((groups, out), _scale_dtype(dtype), output_dim=1)
        default_group = None if self.act_order else -1.0
        index = empty_weight((inputs.size,), torch.int32, input_dim=0, default=default_group)
        module.register_parameter("qweight", packed)
        module.register_parameter("qzeros", zeros)
        module.register_parameter("scales", scales)
        module.register_parameter("g_idx", index)

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Repack for a kernel if there is one; four bits in an order of inputs in which groups are runs."""
        self._drop_spare_bias(module)
        qweight, scales = module.get_parameter("qweight").data, module.get_parameter("scales").data
        zeros = unpack_outputs(module.get_parameter("qzeros").data, self.bits, self.zero_offset)
        self._check_version(zeros)
        zeros = zeros.to(scales.dtype)
        index = self._index(module.get_parameter("g_idx").data, len(scales))
        del module.qweight, module.qzeros, module.scales, module.g_idx
        positions = torch.arange(len(index), device=index.device)
        if torch.equal(index, (self.inputs.start + positions) // self.group):
            scales, zeros = self._share(scales, zeros, len(index))
            self._pack_int4(module, qweight, scales, zeros)
            self._set_parameters(module, qweight, scales, zeros)
            return
        order = even_order(index, self.group)
        if order is not None:
            steps = self._share(scales, zeros, len(index), first=0)
            self._pack_int4(module, qweight, *steps, order)
        self._set_parameters(module, qweight, scales, zeros, index)

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
            return (self.inputs.start + torch.arange(len(index), device=index.device)) // self.group
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
        first = self.inputs.start if first is None else first
        group = gcd(self.group, first, inputs)
        repeats, begin, end = self.group // group, first // group, (first + inputs) // group
        self.group = group
        return (
            scales.repeat_interleave(repeats, dim=0)[begin:end].contiguous(),
            zeros.repeat_interleave(repeats, dim=0)[begin:end].contiguous(),
        )

    def _pack_int4(
        self,
        module: nn.Module,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        order: Tensor | None = None,
    ) -> None:
        if not self.packing.takes(self.bits):
            return

        def columns(begin: int, end: int) -> Tensor:
            codes = unpack_inputs(qweight[:, begin:end], self.bits)
            return codes if order is None else codes[order]

        self.int4 = self.packing.pack(columns, scales, zeros, self.group, in_order=order is None)
        if self.int4 is not None:
            module.add_module("int4", self.int4)
            module.register_buffer(ORDER, order, persistent=False)

    def _set_parameters(
        self,
        module: nn.Module,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor,
        index: Tensor | None = None,
    ) -> None:
        if self.int4 is not None:
            return
        if scales.device.type == "cpu":
            scales, zeros = scales.float(), zeros.float()  # float16 is slow there
        for name, data in ("qweight", qweight), ("scales", scales), ("zeros", zeros):
            replace_parameter(module, name, data)  # so that it counts where the weights are counted
        module.register_buffer("index", index, persistent=False)
        self.repack_codes(
            module, self.bits, lambda begin, end: unpack_inputs(qweight[:, begin:end], self.bits).t(),
            scales.t(), zeros.t(), self.group, index,
        )  # fmt: skip

    def dense(self, module: Any) -> Tensor:
        weight = (module.qweight, module.scales, module.zeros, self.bits, self.group, module.index)
        return dequantize(*weight, torch.float32).t()

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.int4 is None:
            return super().apply(module, x, bias)
        y: Tensor = self.int4(x if module.order is None else x.index_select(-1, module.order))
        return y if bias is None else y + bias


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """float16, which is what the checkpoints have, unless the model computes in float32."""
    return torch.float32 if dtype is torch.float32 else torch.float16
