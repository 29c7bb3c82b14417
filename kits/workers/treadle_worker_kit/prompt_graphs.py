"""CUDA graphs of steps with prompts, in pieces: all but their attention is replayed.

Launching the kernels of a prompt takes longer than running them, up to some thousand tokens: with small
models up to 8,192 and more. A forward pass is captured in pieces, cut where a layer attends; in a step, the
backends attend between the pieces, as in any step that is launched. So lengths, rows and page tables may be
any, and only the number of tokens is rounded up to that of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from treadle.api.attention import (
    CommonAttentionMetadata,
    ForwardContext,
    SupportsExternalKVWrite,
)
from treadle.runner.attention import AttentionGroup, build_metadata
from treadle.runner.model_runner import LoadedModel
from treadle_layers_kit import Attention
from treadle_worker_kit.graph_capture import Pieces, alias

__all__ = ("PromptGraphs",)

MAX_PADDING = (640, 2.0**63), (2048, 1.25), (2**63, 1.05)
"""Up to how many tokens a graph may compute how many for each of the step."""


@dataclass(slots=True)
class AttentionCall:
    """What a layer attends to between two pieces: tensors of the graphs' memory, and a place for the result."""

    layer: Attention
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    out: Tensor  # [tokens, heads · head_size]


@dataclass(slots=True)
class Inputs:
    """What the pieces of a size read, at fixed addresses."""

    ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    logits_indices: Tensor  # int64 [rows]
    forward_ctx: ForwardContext
    slot_mappings: list[
        Tensor | None
    ]  # int64 [tokens] each, of groups whose caches are written in the pieces


@dataclass(slots=True)
class CapturedPrompt:
    """A captured forward pass of ``tokens`` tokens."""

    tokens: int
    inputs: Inputs
    pieces: list[torch.cuda.CUDAGraph]
    calls: list[AttentionCall]  # one between each piece and the next
    hidden: Tensor  # [tokens or rows, hidden]


class PromptGraphs:
    """The forward pass of a model, by its captured pieces where there are some for so many tokens."""

    def __init__(self, loaded: LoadedModel, max_rows: int) -> None:
        """``max_rows`` is the most rows of a step that have logits."""
        self._model = loaded.model
        self._attention: Sequence[AttentionGroup] = loaded.attention
        self._page_size = loaded.info.page_size
        self._num_tables = len(loaded.info.kv_cache_groups)
        self._num_layers = sum(group.layers for group in loaded.info.kv_cache_groups)
        self._device = loaded.device
        self._max_rows = max_rows
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # memory is reused within a stream
        self._captured: dict[int, CapturedPrompt] = {}
        self._inputs: dict[int, Inputs] = {}
        self._outs: dict[int, Tensor] = {}

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_ctx: ForwardContext) -> Tensor:
        """Return hidden states as ``CausalModel.forward`` does, valid until the next step."""
        tokens, indices = len(input_ids), forward_ctx.logits_indices
        size = min((size for size in self._captured if size >= tokens), default=None)
        if (
            size is None
            or size > tokens * next(most for limit, most in MAX_PADDING if size <= limit)
            or indices is None
            or len(indices) > self._max_rows
        ):
            return self._model.forward(input_ids, positions, forward_ctx)
        captured = self._captured[size]
        inputs = captured.inputs
        inputs.ids[:tokens].copy_(input_ids)
        inputs.positions[:tokens].copy_(positions)
        inputs.logits_indices[: len(indices)].copy_(indices)
        for group, metadata, static in zip(
            self._attention, forward_ctx.attn_metadata, inputs.slot_mappings, strict=True
        ):
            if static is not None:
                static[:tokens].copy_(group.backend.slot_mapping(metadata))  # type: ignore[attr-defined]
                static[tokens:].zero_()  # of the null page
        for piece, call in zip(captured.pieces, captured.calls, strict=False):
            piece.replay()
            k = None if call.k is None else call.k[:tokens]
            v = None if call.v is None else call.v[:tokens]
            metadata = forward_ctx.attn_metadata[call.layer.attn_group]
            call.layer.attend(call.q[:tokens], k, v, metadata, call.out[:tokens])
        captured.pieces[-1].replay()
        selects = len(captured.hidden) == len(inputs.logits_indices)
        return captured.hidden[: len(indices) if selects else tokens]

    @torch.inference_mode()
    def warm_up(self, tokens: int) -> float:
        """Run what the pieces of this size run, to compile kernels and create handles of libraries.

        Return the share of the time that launching took.
        """
        inputs = self._inputs_of(tokens)
        inputs.forward_ctx.attend = lambda layer, q, k, v: self._out(layer, tokens)
        start = perf_counter()
        self._model.forward(inputs.ids, inputs.positions, inputs.forward_ctx)
        launched = perf_counter() - start
        torch.cuda.synchronize(self._device)
        return launched / (perf_counter() - start)

    @torch.inference_mode()
    def capture(self, tokens: int) -> bool:
        """Capture the pieces of a size, and return whether the model allows it. The largest comes first.

        One that attends otherwise than by the layers of the kit does not.
        """
        calls: list[AttentionCall] = []

        def attend(layer: Attention, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            pieces.next()
            k, v = k if k is None else alias(k), v if v is None else alias(v)
            calls.append(AttentionCall(layer, alias(q), k, v, self._out(layer, tokens)))
            return calls[-1].out

        inputs = self._inputs_of(tokens)
        inputs.forward_ctx.attend = attend
        pieces = Pieces(self._pool, self._stream)
        with pieces.capturing():
            hidden = self._model.forward(inputs.ids, inputs.positions, inputs.forward_ctx)
        torch.cuda.synchronize(self._device)
        if len(calls) != self._num_layers:
            return False
        self._captured[tokens] = CapturedPrompt(tokens, inputs, pieces.graphs, calls, hidden)
        return True

    def _out(self, layer: Attention, tokens: int) -> Tensor:
        """Return where the result of an attention layer is read: one place for all layers of a width."""
        request = layer.request
        width = request.num_heads * request.head_size
        if width not in self._outs or len(self._outs[width]) < tokens:
            dtype = getattr(torch, request.dtype)
            self._outs[width] = torch.zeros(tokens, width, dtype=dtype, device=self._device)
        return self._outs[width][:tokens]

    def _inputs_of(self, tokens: int) -> Inputs:
        """Return the inputs of a size. They are created before the model runs: that may wait for the device."""
        if tokens not in self._inputs:
            self._inputs[tokens] = self._create_inputs(tokens)
        return self._inputs[tokens]

    def _create_inputs(self, tokens: int) -> Inputs:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self._device)

        batches = [
            CommonAttentionMetadata(
                page_size=self._page_size,
                num_decodes=0,
                max_query_len=tokens,
                max_seq_len=tokens,
                query_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=self._device),
                seq_lens=torch.tensor([tokens], dtype=torch.int32, device=self._device),
                page_table=zeros(1, -(-tokens // self._page_size), dtype=torch.int32),
                slot_mapping=zeros(tokens),
                query_lens_cpu=[tokens],
                seq_lens_cpu=[tokens],
            )
            for _ in range(self._num_tables)
        ]
        indices = zeros(self._max_rows + (self._max_rows == tokens))
        forward_ctx = build_metadata(self._attention, batches, indices)
        mappings = [
            group.backend.slot_mapping(metadata)
            if isinstance(group.backend, SupportsExternalKVWrite)
            else None
            for group, metadata in zip(self._attention, forward_ctx.attn_metadata, strict=True)
        ]
        return Inputs(zeros(tokens), zeros(tokens), indices, forward_ctx, mappings)
