"""The linear layer of a checkpoint that is not quantized."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.models import LinearSpec
from treadle_layers_kit.weight import empty_weight

__all__ = ("PlainLinear",)

log = logging.getLogger(__name__)


class PlainLinear:
    """``x @ W.T + bias`` with the weight in the model's dtype; the ``LinearMethod`` without a scheme.

    On a CPU in bfloat16 ``F.linear`` lays the weight out anew on every call, which costs more than
    half of a decode step. ``process_weights_after_loading`` does it once with oneDNN and frees the plain weight; the
    result is bit-identical. The packed tensor is opaque: no views, no ``state_dict``.
    A kernel that is better at some number of rows may take the place of ``op``.
    """

    treadle_unguarded = True

    def __init__(self) -> None:
        self.op: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self.packs = True
        """Whether the weight may be laid out anew; not where something else reads it as it is."""

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        """Register ``weight`` ``[sum(out_features), in_features]``."""
        shape = (sum(spec.out_features), spec.in_features)
        module.register_parameter(
            "weight", empty_weight(shape, spec.dtype, output_dim=0, input_dim=1)
        )

    def process_weights_after_loading(self, module: nn.Module) -> None:
        parameter = module.get_parameter("weight")
        packed = _prepack(parameter.data) if self.packs else None
        if packed is None:
            return
        # A plain attribute: an opaque tensor can be neither a buffer nor a parameter.
        object.__setattr__(module, "prepacked", packed)
        del module.weight

    def apply(self, module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        packed = module.__dict__.get("prepacked")
        if packed is None:
            return self.op(x, module.weight, bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return y


def _prepack(data: Tensor) -> Tensor | None:
    """oneDNN's own layout of a weight, or ``None`` where it does not apply or does not work.

    The operators are private to torch, so they are tried on one row before they are trusted.
    """
    if data.device.type != "cpu" or data.dtype is not torch.bfloat16:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(data, 1)
        probe = data.new_zeros(1, data.shape[1])
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        log.info("oneDNN does not prepack linear weights here (%s); bfloat16 is slower", error)
        return None
    return packed
