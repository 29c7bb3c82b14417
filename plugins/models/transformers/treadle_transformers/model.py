"""A causal model of transformers as a ``CausalModel``."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treadle.api.attention import ForwardContext
from treadle.api.models import ModelContext
from treadle.errors import CheckpointError
from treadle_layers_kit import cache_scale
from treadle_transformers.attention import (
    ATTENTION_ATTR,
    IMPLEMENTATION,
    PagedAttention,
    Steps,
    observe,
    register,
)
from treadle_transformers.sharding import TPPlan, replace_layers
from treadle_transformers.support import causal_class, check_config, refusal, transformers_config
from treadle_transformers.tensors import allocate_parameters, fill_constants, freeze_rotary

__all__ = ("TransformersModel",)

log = logging.getLogger(__name__)
IDLE = ForwardContext(attn_metadata=())


class TransformersModel(nn.Module):
    """The model's own code, with treadle's layers where the weights and the keys and values are.

    Its children are those of the transformers model, so that names are those of checkpoints.
    Raises ``UnsupportedModelError`` for a model that needs more than paged causal attention, and
    for several ranks where transformers has no plan of how to divide it.
    """

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        ctx = replace(ctx, hf_config=transformers_config(ctx.hf_config))
        architecture, model = _on_meta(ctx)
        log.info(
            "running %s through transformers, slower than a plugin of its own would", architecture
        )
        decoder = model.get_decoder()
        decoder_path = next(path for path, module in model.named_modules() if module is decoder)
        if not decoder_path:
            raise refusal(architecture, "its decoder and its head are not apart")
        constants = freeze_rotary(ctx, model)
        calls = observe(model, decoder, architecture)
        fill_constants(ctx, model, architecture, constants)
        contexts = replace_layers(ctx, model, TPPlan(ctx, architecture, decoder_path), calls)
        allocate_parameters(ctx, model)
        self.steps = Steps(IDLE)
        for path, call in calls.items():
            paged_attention = PagedAttention(contexts[path], path, call, self.steps)
            block: Any = model.get_submodule(path)
            block.add_module(ATTENTION_ATTR, paged_attention)
            # The loader asks the module that the names of such scales begin with.
            block.locate = partial(cache_scale, parameter=f"{ATTENTION_ATTR}.attn.kv_scale")
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        # Kept from nn.Module: both are made of the modules above.
        self._parts = (decoder, _bypass_decoder(model, decoder_path))

    def forward(self, input_ids: Tensor, positions: Tensor, forward_ctx: ForwardContext) -> Tensor:
        """``[tokens]`` ids and positions to hidden states ``[tokens, hidden]``."""
        self.steps.current = forward_ctx
        try:
            output = self._parts[0](
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False
            )
        finally:
            self.steps.current = IDLE
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocab]``, with the model's own scalings and caps."""
        logits: Tensor = self._parts[1](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def _on_meta(ctx: ModelContext) -> tuple[str, Any]:
    """The architecture and its model without memory; it takes the place of the loaded one."""
    config = copy.deepcopy(ctx.hf_config)
    architecture, family = _family(config)
    if not isinstance(config, family.config_class):
        raise refusal(
            architecture,
            f"the configuration has model_type {getattr(config, 'model_type', None)!r}, and the "
            f"class reads {family.config_class.model_type!r} (code in a checkpoint is never run)",
        )
    check_config(architecture, config)
    register()
    config.use_cache = False
    config._attn_implementation = IMPLEMENTATION
    try:
        with torch.device("meta"):
            model = family(config)
    except Exception as error:  # each family checks its configuration in its own way
        raise CheckpointError(
            f"transformers cannot build {architecture} from this configuration "
            f"({type(error).__name__}: {error}); correct it with hf_overrides"
        ) from error
    model.tie_weights()
    # Some models look for padding in every batch, and wait for the device to do so. Set past the
    # checks of the configuration, which want a number.
    object.__setattr__(config, "pad_token_id", None)
    if any(isinstance(m, nn.Conv1d) for m in model.modules()):
        raise refusal(
            architecture, "it has convolutions over tokens, whose state treadle does not keep"
        )
    return architecture, model.eval()


def _family(config: Any) -> tuple[str, Any]:
    for name in config.architectures:
        if (family := causal_class(name)) is not None:
            return name, family
    raise refusal(" or ".join(config.architectures), "it is not a causal language model")


def _bypass_decoder(model: Any, decoder_path: str) -> Any:
    """``model`` with a decoder that returns the hidden states that it is given."""
    name, _, sub_path = decoder_path.partition(".")
    head = copy.copy(model)
    child = _PassThrough() if not sub_path else _bypass_decoder(getattr(model, name), sub_path)
    head._modules = {**model._modules, name: child}
    return head


class _PassThrough(nn.Module):
    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


class _Hidden:
    """The output of a decoder of which only the hidden states are known."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]
