"""A loaded decoder as the library runs it: structs that point to the module's own tensors."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.errors import EngineError
from treadle_kernels_native.int8 import quantize
from treadle_kernels_native.linear_structs import FORMATS, LinearStructs, bias_of, row_weight
from treadle_kernels_native.linears import destroy
from treadle_kernels_native.structs import (
    MAX_TABLES,
    InstructionSet,
    Layer,
    Linear,
    Model,
    Step,
)
from treadle_layers_kit.decode_step import DecoderFacts
from treadle_layers_kit.mapping import is_mapped, release_pages

__all__ = ("NativeProgram",)

MAX_THREADS = 256


class NativeProgram:
    """A ``DecodeProgram``. It owns the library's threads and memory, and keeps the tensors alive.

    Raises ``EngineError`` if its memory or its threads are not to be had.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        model: Any,
        facts: DecoderFacts,
        instruction_set: InstructionSet,
        pin: bool,
    ) -> None:
        self._library = library
        self._linears = LinearStructs()
        self._kept = self._linears.kept
        self._ropes: dict[int, tuple[Tensor, Tensor]] = {}
        self._sizes = facts
        self._model = self._describe(model)
        if len(facts.page_tables) > MAX_TABLES:
            raise EngineError(
                f"the model has {len(facts.page_tables)} KV cache groups, at most 8 work"
            )
        threads = min(facts.threads, MAX_THREADS)
        self._engine = self._library.tn_create(
            ctypes.byref(self._model), threads, instruction_set, pin
        )
        if not self._engine:
            raise EngineError(
                f"there is no memory, or there are no {threads} threads, for native kernels"
            )
        self.close = weakref.finalize(self, destroy, self._library, self._engine, os.getpid())
        self._vocab_size = int(self._model.head.n)
        self._logits = torch.empty(0, self._vocab_size)
        self._tokens = torch.empty(facts.max_rows, dtype=torch.int64)
        # Views of the first rows of both, by their number: making them anew costs as much as a small layer.
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        numbers: Any = ctypes.c_int32 * facts.max_rows
        self._slots, self._starts, self._counts = numbers(), numbers(), numbers()
        self._samples: Any = (ctypes.c_uint8 * facts.max_rows)()
        self._prompt_ids = np.zeros(facts.max_tokens, dtype=np.int64)
        self._step = self._step_struct()
        self._step_address = ctypes.addressof(self._step)
        self._tokens_address = self._tokens.data_ptr()

    def run(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        samples: Sequence[bool],
        num_decodes: int,
        prompt_ids: Sequence[int],
    ) -> Tensor:
        """See ``DecodeProgram.run``. Raises ``ValueError`` for what no scheduler of this engine sends."""
        rows, step, facts = len(slots), self._step, self._sizes
        longest = max(map(int.__add__, starts, counts))
        tokens = num_decodes + len(prompt_ids)
        if rows > facts.max_rows or len(prompt_ids) > facts.max_tokens or longest > self._max_len:
            raise ValueError(
                f"a step of {rows} rows and {tokens} tokens, up to position {longest}, exceeds the "
                f"{facts.max_rows} rows, {facts.max_tokens} tokens or {self._max_len} positions"
            )
        self._slots[:rows], self._starts[:rows] = slots, starts
        self._counts[:rows], self._samples[:rows] = counts, samples
        if prompt_ids:
            self._prompt_ids[: len(prompt_ids)] = prompt_ids
        sampled = sum(samples)
        if self._logits.shape[0] < sampled:
            self._logits = torch.empty(min(2 * sampled, facts.max_rows), self._vocab_size)
            step.logits = self._logits.data_ptr()
            self._views.clear()
        step.rows, step.num_decodes = rows, num_decodes
        self._library.tn_run(self._engine, self._step_address)
        if sampled not in self._views:
            self._views[sampled] = self._logits[:sampled], self._tokens[:sampled]
        return self._views[sampled][0]

    def argmax(self) -> Tensor:
        """See ``DecodeProgram.argmax``."""
        self._library.tn_argmax(self._engine, self._step_address, self._tokens_address)
        return self._views[self._step.rows][1]

    # ------------------------------------------------------------------------------- structs

    def _describe(self, model: Any) -> Model:
        decoder, facts = model.model, self._sizes
        layers = (Layer * len(decoder.layers))()
        for struct, layer in zip(layers, decoder.layers, strict=True):
            self._fill_layer(struct, layer)
        attention, first = decoder.layers[0].self_attn.attn.request, decoder.layers[0]
        cache = first.self_attn.attn.cache
        embedding = decoder.embed_tokens.weight
        self._kept += [layers, embedding]
        return Model(
            layers=layers,
            embedding=embedding.data_ptr(),
            final_norm=self._norm(decoder.norm),
            head=self._head(model.lm_head, rounds=bool(layers[0].down.sums)),
            eps=decoder.norm.eps,
            num_layers=len(layers),
            hidden=embedding.shape[1],
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_size=attention.head_size,
            intermediate=first.mlp.down_proj.inputs.size,
            embedding_format=FORMATS[embedding.dtype],
            cache_format=FORMATS[cache.dtype],
            page_size=facts.page_size,
        )

    def _fill_layer(self, struct: Layer, layer: Any) -> None:
        block, mlp, facts = layer.self_attn, layer.mlp, self._sizes
        request, cache = block.attn.request, block.attn.cache
        expected = (2, facts.page_size, request.num_kv_heads, request.head_size)
        if (cache.shape[0], *cache.shape[2:]) != expected or not cache.is_contiguous():
            raise EngineError(
                f"the attention backend lays its cache out as {list(cache.shape)}, not as [2, pages, "
                f"{facts.page_size}, {request.num_kv_heads}, {request.head_size}]"
            )
        self._kept.append(cache)
        struct.input_norm = self._norm(layer.input_layernorm)
        struct.post_norm = self._norm(layer.post_attention_layernorm)
        struct.q_norm, struct.k_norm = self._norm(block.q_norm), self._norm(block.k_norm)
        cos, sin = self._rope(block.rotary)
        struct.cos, struct.sin = cos.data_ptr(), sin.data_ptr()
        struct.keys, struct.values = cache[0].data_ptr(), cache[1].data_ptr()
        struct.qkv, struct.o = self._linears.of(block.qkv_proj), self._linears.of(block.o_proj)
        struct.gate_up, struct.down = (
            self._linears.of(mlp.gate_up_proj),
            self._linears.of(mlp.down_proj),
        )
        struct.scale, struct.window = request.scale, request.window or 0
        struct.table = facts.cache_groups[block.attn.attn_group]

    def _head(self, head: Any, *, rounds: bool) -> Linear:
        """The output head, in eight bits where activations of layers are: it is read for every token."""
        if not rounds or row_weight(head) is not None:
            return self._linears.of(head)
        weight = head.get_parameter("weight")
        codes, scales = quantize(weight.detach())
        if is_mapped(weight):
            release_pages(weight)  # steps read only some rows of an embedding that is tied to it
        return self._linears.int8(codes, scales, bias_of(head))

    def _norm(self, norm: Any) -> int | None:
        if norm is None:
            return None
        return self._linears.address((norm.weight.detach().float() + norm.offset).contiguous())

    def _rope(self, rotary: Any) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, ``[max_model_len, head_size / 2]``, as ``cos_sin`` has them."""
        if id(rotary) not in self._ropes:
            half = rotary.inv_freq.numel() // 2
            angles = torch.arange(self._max_len)[:, None] * rotary.inv_freq[:half]
            cos, sin = angles.cos().mul_(rotary.scaling), angles.sin_().mul_(rotary.scaling)
            self._ropes[id(rotary)] = (cos, sin)
        return self._ropes[id(rotary)]

    @property
    def _max_len(self) -> int:
        return self._sizes.max_model_len + 1

    def _step_struct(self) -> Step:
        facts = self._sizes
        columns = {table.shape[1] for table in facts.page_tables}
        if len(columns) != 1 or not all(t.flags.c_contiguous for t in facts.page_tables):
            raise EngineError("the page tables are not contiguous arrays of one shape")
        step = Step(
            slots=ctypes.addressof(self._slots),
            starts=ctypes.addressof(self._starts),
            counts=ctypes.addressof(self._counts),
            samples=ctypes.addressof(self._samples),
            prompt_ids=self._prompt_ids.ctypes.data,
            last_tokens=facts.last_tokens.data_ptr(),
            columns=columns.pop(),
        )
        for index, table in enumerate(facts.page_tables):
            step.tables[index] = table.ctypes.data
        return step
