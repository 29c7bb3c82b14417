"""Which models the library runs: decoders made of layers whose arithmetic it knows.

A layer is known by its class and by having no method of its own, so that a model that changes one
of them runs in torch, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from treadle.api.attention import MaskKind
from treadle.errors import UnsupportedModelError
from treadle_kernels_native.int8 import RoundedLinear
from treadle_kernels_native.library import LibraryError, choose_instruction_set, load_library
from treadle_kernels_native.linear_structs import row_weight
from treadle_kernels_native.program import NativeProgram
from treadle_kernels_native.structs import InstructionSet
from treadle_layers_kit import (
    CausalDecoder,
    Decoder,
    DecoderLayer,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    PlainLinear,
    QKVLinear,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    ops,
)
from treadle_layers_kit.decode_step import DecoderFacts
from treadle_layers_kit.linear_norms import has_default_forward
from treadle_layers_kit.mapping import allow_mapping
from treadle_layers_kit.row_packing import RowPacking

__all__ = ("NativePlan", "plan")

MAX_GROUP = 48
"""Query heads of one KV head, ``TN_QUERIES`` of the library."""


def plan(model: nn.Module, *, isa: str, pin: bool) -> NativePlan | str:
    """Return the plan for an empty model, or why the library cannot run it.

    Raises ``ConfigError`` for an instruction set that the machine lacks.
    """
    try:
        library = load_library()
    except LibraryError as error:
        return str(error)
    instruction_set = choose_instruction_set(library, isa)
    reason = next(_misfits(model), None)
    if reason is not None:
        return reason
    for module in model.modules():
        packing = RowPacking.of(module)
        if packing is not None:
            packing.by_rows = True
        elif isinstance(module, (Linear, Embedding)):
            allow_mapping([module.get_parameter("weight")])
        if isinstance(module, Linear) and isinstance(module.method, PlainLinear):
            module.method.packs = False  # the library reads weights as they are
    return NativePlan(library, model, instruction_set, pin)


class NativePlan:
    """A model of known form. Its program reads the module's own tensors."""

    def __init__(
        self, library: CDLL, model: Any, instruction_set: InstructionSet, pin: bool
    ) -> None:
        self._library, self._model = library, model
        self._instruction_set, self._pin = instruction_set, pin

    def compile(self, facts: DecoderFacts) -> tuple[NativeProgram, str]:
        """Return the program and a sentence about it.

        Raises ``EngineError``, and ``UnsupportedModelError`` if another plugin's kernel or
        attention was given a place in the model since: a program would not call it.
        """
        replaced = next(_replaced(self._model), None)
        if replaced is not None:
            raise UnsupportedModelError(f"another plugin has a kernel for {replaced} of this model")
        uneven = next(_uneven(self._model), None)
        if uneven is not None:
            raise UnsupportedModelError(f"{uneven} has groups of different sizes")
        others = sorted(set(facts.attention) - {"sdpa"})
        if others:
            raise UnsupportedModelError(f"attention backend {others[0]} was chosen, not sdpa")
        program = NativeProgram(self._library, self._model, facts, self._instruction_set, self._pin)
        threads = f"{facts.threads} thread{'s' * (facts.threads != 1)}"
        name = self._instruction_set.name.lower()
        return program, f"Steps run in one call by native kernels ({name}, {threads})."


def _replaced(model: nn.Module) -> Iterator[str]:
    """Yield the operations of the model that are no longer its own."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            if module.op is not ops.rms_norm:
                yield "rms_norm"
            if module.add_op is not ops.fused_add_rms_norm or module.partials_op is not None:
                yield "fused_add_rms_norm"
        elif isinstance(module, RotaryEmbedding) and module.op is not ops.rotary:
            yield "rotary"
        elif isinstance(module, SelfAttention) and module.fused is not None:
            yield "rope_and_cache"
        elif isinstance(module, GatedMLP) and (
            module.op is not ops.silu_and_mul or module.fused is not None
        ):
            yield "silu_and_mul"
        elif isinstance(module, Linear):
            method = module.method
            if isinstance(method, PlainLinear) and method.op is not F.linear:
                yield "linear"


def _uneven(model: nn.Module) -> Iterator[str]:
    """Yield the layers whose weight did not become what the plan asked for: only the checkpoint tells."""
    for name, module in model.named_modules():
        if RowPacking.of(module) is not None and row_weight(module) is None:
            yield name


def _misfits(model: Any) -> Iterator[str]:
    """Yield why the library cannot run the model; what follows the first may not be true."""
    if not has_default_forward(model, CausalDecoder, "compute_logits"):
        yield f"{type(model).__name__} is not a decoder of the usual form"
        return
    decoder, head = model.model, model.lm_head
    if not has_default_forward(decoder, Decoder, "embed"):
        yield f"{type(decoder).__name__} embeds or runs its layers in its own way"
    if not has_default_forward(decoder.embed_tokens, Embedding):
        yield "the embedding is not the usual one"
    yield from _norm_reasons("norm", decoder.norm)
    yield from _linear_reasons("lm_head", head, LMHead)
    if decoder.embed_tokens.tp_group.world_size != 1:
        yield "the model is shared by several ranks"
    first = decoder.layers[0]
    for index, layer in enumerate(decoder.layers):
        for reason in _layer_reasons(layer):
            yield f"layer {index}: {reason}"
        sizes = [m.self_attn.attn.request for m in (first, layer)]
        if len({(s.num_heads, s.num_kv_heads, s.head_size) for s in sizes}) != 1:
            yield f"layer {index} has other heads than the first"
        if layer.mlp.down_proj.inputs.size != first.mlp.down_proj.inputs.size:
            yield f"layer {index} has another intermediate size than the first"
        if layer.input_layernorm.eps != decoder.norm.eps:
            yield f"layer {index} has another epsilon than the last norm"


def _layer_reasons(layer: Any) -> Iterator[str]:
    if not has_default_forward(layer, DecoderLayer, "forward_attention"):
        yield f"{type(layer).__name__} is not a layer of the usual form"
        return
    attention, mlp = layer.self_attn, layer.mlp
    if not has_default_forward(attention, SelfAttention):
        yield f"{type(attention).__name__} is not the usual attention block"
        return
    if not has_default_forward(mlp, GatedMLP):
        yield f"{type(mlp).__name__} is not the usual gated MLP"
        return
    if mlp.op is not ops.silu_and_mul:
        yield "the activation of the MLP is not silu"
    yield from _norm_reasons("input_layernorm", layer.input_layernorm)
    yield from _norm_reasons("post_attention_layernorm", layer.post_attention_layernorm)
    yield from _attention_reasons(attention)
    yield from _linear_reasons("qkv_proj", attention.qkv_proj, QKVLinear)
    yield from _linear_reasons("o_proj", attention.o_proj, Linear)
    yield from _linear_reasons("gate_up_proj", mlp.gate_up_proj, Linear)
    yield from _linear_reasons("down_proj", mlp.down_proj, Linear)


def _attention_reasons(block: Any) -> Iterator[str]:
    request, rotary = block.attn.request, block.rotary
    norms = (block.q_norm, block.k_norm)
    if norms != (None, None):
        for name, norm in zip(("q_norm", "k_norm"), norms, strict=True):
            yield from _norm_reasons(name, norm)
    if not has_default_forward(rotary, RotaryEmbedding, "cos_sin") or rotary.interleaved:
        yield "the rotary embedding is not the usual one"
    if rotary.inv_freq.numel() != request.head_size:
        yield "only a part of each head is rotated"
    if request.mask not in (MaskKind.CAUSAL, MaskKind.SLIDING):
        yield f"the mask is {request.mask.value}"
    if request.softcap is not None or request.sinks or request.latent:
        yield "attention has soft caps, sinks or latents"
    if request.head_size % 32:
        yield f"head size {request.head_size} is not a multiple of 32"
    if request.num_heads // request.num_kv_heads > MAX_GROUP:
        yield f"a KV head has more than {MAX_GROUP} query heads"
    if request.kv_dtype not in ("auto", request.dtype):
        yield f"the KV cache is in {request.kv_dtype}"


def _norm_reasons(name: str, norm: Any) -> Iterator[str]:
    if not has_default_forward(norm, RMSNorm):
        yield f"{name} is {type(norm).__name__}, not RMSNorm"


def _linear_reasons(name: str, linear: Any, base: type[Linear]) -> Iterator[str]:
    if not has_default_forward(linear, base):
        yield f"{name} is {type(linear).__name__}, which computes in its own way"
        return
    method, packing = linear.method, RowPacking.of(linear)
    if packing is not None:
        if misfit := packing.row_misfit():
            yield f"{name} {misfit}"
    elif isinstance(method, RoundedLinear):
        if not isinstance(linear, LMHead) and linear.inputs.size % 32 == 0:
            return
    elif not isinstance(method, PlainLinear) or method.op is not F.linear:
        yield f"{name} is computed by {type(method).__name__}"
    if linear.dtype not in (torch.float32, torch.bfloat16):
        yield f"{name} is in {linear.dtype}"
    if linear.inputs.size % 32:
        yield f"{name} has {linear.inputs.size} inputs, which is not a multiple of 32"
