"""Turning a model on the meta device into one with room for its weights, and its own constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.models import ModelContext
from treadle_transformers.sharding import stays_float32
from treadle_transformers.support import refusal

__all__ = ("allocate_parameters", "fill_constants", "freeze_rotary")

Constant = tuple[nn.Module, str, Tensor]
"""A module, the name of a buffer, and what it holds."""


def allocate_parameters(ctx: ModelContext, model: Any) -> None:
    """Give every parameter that is still on the meta device memory; tied ones stay tied.

    Buffers that checkpoints hold become parameters, because those are what the loader fills.
    """
    parameters: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        persistent = set(module._buffers) - module._non_persistent_buffers_set
        tensors = {**module._parameters, **{name: module._buffers[name] for name in persistent}}
        for name, tensor in tensors.items():
            if tensor is None or hasattr(tensor, "treadle_layout"):
                continue  # a layer of ours, which has made its own
            if id(tensor) not in parameters:
                dtype = tensor.dtype
                if dtype.is_floating_point and not stays_float32(model, f"{path}.{name}"):
                    dtype = ctx.dtype
                data = torch.empty(tensor.shape, dtype=dtype, device=ctx.device)
                parameters[id(tensor)] = nn.Parameter(data, requires_grad=False)
            module._buffers.pop(name, None)
            module._parameters[name] = parameters[id(tensor)]


def fill_constants(
    ctx: ModelContext, model: Any, architecture: str, constants: list[Constant]
) -> None:
    """Compute the buffers that no checkpoint holds, as transformers does after it has loaded."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # it stays as it is
    for path, module in model.named_modules():
        names = module._non_persistent_buffers_set & set(module._buffers)
        for name in names:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=ctx.device)
        if names:
            with torch.no_grad():
                model._init_weights(module)
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise refusal(architecture, f"{path}.{name} is a tensor that is no buffer")
    for module, name, value in constants:
        module.get_buffer(name).copy_(value)


def freeze_rotary(ctx: ModelContext, model: Any) -> list[Constant]:
    """Stop rotary embeddings from changing with the length of a batch.

    Their frequencies are those of the longest sequence that the engine admits: a sequence must not
    depend on its neighbours, and nothing may wait for the device to say how long they are.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    constants: list[Constant] = []
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)
        for layer, rope_type in (
            rope_types.items() if isinstance(rope_types, dict) else [(None, rope_types)]
        ):
            if rope_type is None or not ("dynamic" in rope_type or rope_type == "longrope"):
                continue
            max_len = ctx.max_model_len or module.config.max_position_embeddings
            prefix, options = (f"{layer}_", {"layer_type": layer}) if layer else ("", {})
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
                module.config, torch.device("cpu"), seq_len=max_len, **options
            )
            setattr(module, f"{prefix}attention_scaling", scaling)
            constants.append((module, f"{prefix}inv_freq", inv_freq))
            # Read at every step to see whether the frequencies must change.
            if layer:
                module.rope_type = {**module.rope_type, layer: "default"}
            else:
                module.rope_type = "default"
    return constants
