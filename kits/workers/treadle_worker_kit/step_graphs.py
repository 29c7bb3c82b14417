"""CUDA graphs of steps of few tokens: one replay instead of hundreds of kernel launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.api.attention import CommonAttentionMetadata, MaskKind
from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import SchedulerOutput
from treadle.runner.attention import AttentionGroup, build_metadata
from treadle.runner.inputs import expand_tokens
from treadle.runner.model_runner import ModelRunner
from treadle.runner.outputs import flag_invalid
from treadle.sampling.features import Features
from treadle_worker_kit.graph_capture import Pieces, Ring, Turn, alias

__all__ = ("StepGraphs", "sampling_sets")

FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 32, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 128},
    {"top_p": 0.9},
    {"top_k": 129},
)
"""Parameters, the cheapest first, whose features a captured sampling has beside those of the ones before."""

MAX_PROMPT_READS = 2**18
"""Keys that the prompt tokens of a captured step may read in each layer. A captured row attends alone, so
that each token of a prompt reads all that came before it; beyond this, tokens that share what they read
are faster although their attention is launched."""


@dataclass(slots=True)
class CapturedForward:
    """A captured forward pass of ``rows`` tokens, with its tensors at fixed addresses."""

    rows: int
    inputs: Tensor  # int64 [3 + 3 * groups, rows]: slots, positions, indices of the ids; for each
    # group: slot mapping, flat index of the token's page in the page table, and the page id (int32,
    # first half). A copy of a place of the ring, in memory that the other sizes use, too.
    query_start_loc: Tensor  # int32 [rows + 1]: 0, 1, …; constant, read by every replay
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [rows, vocab], like the inputs
    mask: torch.cuda.CUDAGraph | None = None
    """Masks the logits; ``None`` for a size that no step has which only decodes."""
    sampling: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    """For each set of ``sampling_sets``. They write tokens, from ``flag_invalid``, to their ring."""

    def columns(self, count: int) -> tuple[Tensor, Tensor]:
        """See ``CapturedStep``."""
        slots, positions = self.inputs[:2, :count]
        return slots, positions


def sampling_sets(vocab_size: int) -> list[Features]:
    """Return the sets of features that sampling is captured for, the last of which has all of them.

    Clients choose among far more; each of these is served by the first set that has all of its features.
    """

    def features(temperature: float = 1.0, top_k: int = 0, **params: Any) -> Features:
        top_k = min(top_k, vocab_size - 1)  # more is no bound
        return Features.of(
            SamplingParams(temperature=temperature, top_k=top_k, **params), vocab_size
        )

    greedy, random = features(temperature=0.0), features()
    filters = (features(**params) for params in FILTERS)
    return [greedy, random, *itertools.accumulate(filters, or_, initial=greedy | random)]


class StepGraphs:
    """Captures and replays steps by their number of tokens, each of which is a row.

    A step of ``n`` tokens replays the smallest captured size of at least ``n``; the other rows use
    the padding slot. A layer writes the keys of all rows before it attends, so that the tokens of a
    prompt can be rows of one slot. Sampling is captured separately, for steps that only decode, and
    for a few sets of features.
    """

    def __init__(self, runner: ModelRunner, attention: Sequence[AttentionGroup]) -> None:
        """``attention`` are the groups of the runner's model."""
        self._model = runner.model
        self._attention = attention
        self._tables = runner.tables
        self._sampler = runner.sampler
        self._sets = sampling_sets(runner.info.vocab_size)
        # The last token of each slot, then room for the prompt ids of a step.
        self._last_tokens = runner.last_tokens
        self._packer = runner.packer
        self._page_size = runner.info.page_size
        self._max_len = runner.info.max_model_len
        self._device = runner.device
        self._num_slots = len(runner.tables.device[0])
        self._padding = self._num_slots - 1
        self._causal = all(
            group.request.mask in (MaskKind.CAUSAL, MaskKind.SLIDING) for group in attention
        )
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # memory is reused within a stream
        self._copies = torch.cuda.Stream(self._device)
        self._captured: dict[int, CapturedForward] = {}
        self._sizes: list[int] = []
        words = runner.sampler.vocab_size // 32 + 1
        self._bitmask = torch.empty(0, words, dtype=torch.int32, device=self._device)
        self._lines = 3 + 3 * len(self._tables.device)  # of ``CapturedForward.inputs``
        self._turn = Turn(self._device)
        self._inputs: Ring  # of the largest size, which is captured first
        self._tokens: Ring

    # ----------------------------------------------------------------------------- capture

    @torch.inference_mode()
    def warm_up(self, rows: int, *, with_sampling: bool = False) -> None:
        """Run a step of ``rows`` decodes, to compile kernels and create handles of libraries."""
        inputs = torch.zeros(self._lines, rows, dtype=torch.int64, device=self._device)
        inputs[0] = self._padding
        logits = self._forward(inputs, self._starts(rows))
        if with_sampling:
            self._sampler.bitmask_op(logits, self._masks(rows))
            for features in self._sets:
                if not (features.filters and self._captured):  # filters are torch's: once is enough
                    self._sample(inputs, logits, features)
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def capture(self, rows: int, *, with_sampling: bool) -> None:
        """Capture a size: its forward pass and, for steps that only decode, its sampling.

        The largest comes first: all share its memory.
        """
        if not self._captured:
            self._inputs = Ring(self._lines * rows, self._device)
            self._tokens = Ring(rows, self._device)
        starts = self._starts(rows)
        pieces = Pieces(self._pool, self._stream)
        with pieces.capturing():
            self._turn.advance()
            ring = self._inputs.device[:, : self._lines * rows]
            inputs = ring.index_select(0, self._turn.index).view(self._lines, rows)
            logits = self._forward(inputs, starts)
        captured = CapturedForward(rows, alias(inputs), starts, pieces.graphs[0], alias(logits))
        if with_sampling:
            masking = Pieces(self._pool, self._stream)
            with masking.capturing():
                self._sampler.bitmask_op(logits, self._masks(rows))
            captured.mask = masking.graphs[0]
            for features in self._sets:
                sampling = Pieces(self._pool, self._stream)
                with sampling.capturing():
                    tokens = self._sample(inputs, logits, features)
                    self._tokens.device[:, :rows].index_copy_(0, self._turn.index, tokens[None])
                captured.sampling.append(sampling.graphs[0])
        self._captured[rows] = captured
        self._sizes = sorted(self._captured)

    def _starts(self, rows: int) -> Tensor:
        """Return ``CapturedForward.query_start_loc``."""
        return torch.arange(rows + 1, dtype=torch.int32, device=self._device)

    def _forward(self, inputs: Tensor, query_start: Tensor) -> Tensor:
        slots, positions, id_indices = inputs[:3]
        rows = len(slots)
        kv_lens = torch.empty(rows, dtype=torch.int32, device=self._device)
        torch.add(positions, 1, out=kv_lens)
        groups = list(zip(self._tables.device, inputs[3:].split(3), strict=True))
        for table, (_, indices, pages) in groups:
            # Write the page of the new token here: a separate copy between two graphs would cost
            # 10 to 25 us.
            table.view(-1).index_copy_(0, indices, pages.view(torch.int32)[:rows])
        batches = [
            CommonAttentionMetadata(
                page_size=self._page_size,
                num_decodes=rows,
                max_query_len=1,
                max_seq_len=self._max_len,
                query_start_loc=query_start,
                seq_lens=kv_lens,
                page_table=table.index_select(0, slots),
                slot_mapping=mapping,
                query_lens_cpu=[1] * rows,
                seq_lens_cpu=[self._max_len] * rows,
            )
            for table, (mapping, _, _) in groups
        ]
        forward_ctx = build_metadata(self._attention, batches)
        ids = self._last_tokens.index_select(0, id_indices)
        return self._model.compute_logits(self._model.forward(ids, positions, forward_ctx))

    def _sample(self, inputs: Tensor, logits: Tensor, features: Features) -> Tensor:
        slots, positions = inputs[:2]
        tokens, invalid = self._sampler.sample_graphable(logits, slots, positions + 1, features)
        self._last_tokens.index_copy_(0, slots, tokens)
        return flag_invalid(tokens, invalid)

    def _masks(self, rows: int) -> Tensor:
        """Return where graphs read masks, int32 ``[rows, words]``. The largest size comes first."""
        if not len(self._bitmask):
            self._bitmask = self._bitmask.new_full((rows, self._bitmask.shape[1]), -1)
        return self._bitmask[:rows]

    # ------------------------------------------------------------------------------ replay

    def find(self, step: SchedulerOutput) -> CapturedForward | None:
        """Return the smallest captured step that has a row for each token, or ``None``."""
        if step.tokens:
            counts = step.num_scheduled_tokens
            chunks = list(zip(step.num_computed_tokens, counts, strict=True))[step.num_decodes :]
            reads = sum((start + count / 2) * count for start, count in chunks)
            if not self._causal or reads > MAX_PROMPT_READS:
                return None
        rows = step.num_decodes + len(step.tokens)
        return next((self._captured[size] for size in self._sizes if size >= rows), None)

    def forward(self, captured: CapturedForward, step: SchedulerOutput) -> Tensor:
        """Replay the forward pass; return logits ``[tokens, vocab]``, valid until the next."""
        rows = step.num_decodes + len(step.tokens)
        size = self._page_size
        turn, num_inputs = self._turn.following, self._lines * captured.rows
        inputs = self._inputs.pinned.numpy()[turn, :num_inputs].reshape(self._lines, captured.rows)
        inputs[0, rows:], inputs[1, rows:] = self._padding, 0
        inputs[0, :rows], inputs[1, :rows] = expand_tokens(step)
        inputs[2] = inputs[0]
        if step.tokens:
            inputs[2, step.num_decodes : rows] = self._num_slots + np.arange(len(step.tokens))
            prompt_ids = self._last_tokens[self._num_slots :][: len(step.tokens)]
            self._packer.copy_to(prompt_ids, np.asarray(step.tokens, dtype=np.int64))
        column = inputs[1] // size
        for group, table in enumerate(self._tables.tables_cpu):
            mapping, indices, pages = inputs[3 + 3 * group : 6 + 3 * group]
            pages.view(np.int32)[: len(pages)] = page_ids = table[inputs[0], column]
            mapping[:] = page_ids.astype(np.int64) * size + inputs[1] % size
            indices[:] = inputs[0] * table.shape[1] + column
        captured.graph.replay()
        self._turn.number = turn
        return captured.logits[:rows]

    def sample(
        self,
        captured: CapturedForward,
        rows: int,
        features: Features,
        masks: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Tensor:
        """Replay sampling after ``forward``. Return tokens ``[rows]``, from ``flag_invalid``, on the CPU
        side: they come with the end of the step, and stay until some steps later.

        ``masks`` are rows of the step, int64 ``[n]``, and the bitmask of each, int32 ``[n, words]``.
        """
        if masks is not None and captured.mask is not None:
            self._write_bitmask(rows, *masks)
            captured.mask.replay()
        index = next(i for i, kept in enumerate(self._sets) if kept | features == kept)
        captured.sampling[index].replay()
        return self._tokens.pinned[self._turn.number, :rows]

    def _write_bitmask(self, rows: int, indices: np.ndarray, masks: np.ndarray) -> None:
        """Copy the masks to where the graphs read them; the other rows may have every token."""
        if len(indices) == rows and masks.flags.writeable:
            # Of this process, where masks are filled into pinned memory. The device copies them beside the forward
            # pass, and this thread waits: a stream that waits for another runs each of its kernels later.
            with torch.cuda.stream(self._copies):
                self._bitmask[:rows].copy_(torch.from_numpy(masks), non_blocking=True)
            self._copies.synchronize()
        else:
            uploaded = self._packer.upload(indices, masks)
            self._bitmask[:rows].fill_(-1).index_copy_(0, *uploaded)
