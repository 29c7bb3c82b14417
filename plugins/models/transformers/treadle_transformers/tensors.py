"""Turning a model on the meta device into one with room for its weights, and its own constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.models import ModelContext
from treadle_transformers.sharding import stays_float32
from treadle_transformers.support import refusal

__all__ = ("fill_constants", "fix_rotary", "make_room")

Constant = tuple[nn.Module, str, Tensor]
"""A module, the name of a buffer, and what it holds."""


def make_room(ctx: ModelContext, model: Any) -> None:
    """Give every parameter that is still on the meta device memory; tied ones stay tied.

    Buffers that checkpoints hold become parameters, because those are what the loader fills.
    """
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        persistent = set(module._buffers) - module._non_persistent_buffers_set
        tensors = {**module._parameters, **{name: module._buffers[name] for name in persistent}}
        for name, tensor in tensors.items():
            if tensor is None or hasattr(tensor, "treadle_layout"):
                continue  # a layer of ours, which has made its own
            if id(tensor) not in made:
                dtype = tensor.dtype
                if dtype.is_floating_point and not stays_float32(model, f"{path}.{name}"):
                    dtype = ctx.dtype
                room = torch.empty(tensor.shape, dtype=dtype, device=ctx.device)
                made[id(tensor)] = nn.Parameter(room, requires_grad=False)
            module._buffers.pop(name, None)
            module._parameters[name] = made[id(tensor)]


def fill_constants(ctx: ModelContext, model: Any, architecture: str, known: list[Constant]) -> None:
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
    for module, name, value in known:
        module.get_buffer(name).copy_(value)


def fix_rotary(ctx: ModelContext, model: Any) -> list[Constant]:
    """Stop rotary embeddings from changing with the length of a batch.

    Their frequencies are those of the longest sequence that the engine admits: a sequence must not
    depend on its neighbours, and nothing may wait for the device to say how long they are.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found: list[Constant] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind is None or not ("dynamic" in kind or kind == "longrope"):
                continue
            longest = ctx.max_model_len or module.config.max_position_embeddings
            prefix, said = (f"{layer}_", {"layer_type": layer}) if layer else ("", {})
            turns, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, torch.device("cpu"), seq_len=longest, **said
            )
            setattr(module, f"{prefix}attention_scaling", scaling)
            found.append((module, f"{prefix}inv_freq", turns))
            # Read at every step to see whether the frequencies must change.
            if layer:
                module.rope_type = {**module.rope_type, layer: "default"}
            else:
                module.rope_type = "default"
    return found
