"""The sampler: from logits to tokens, with the parameters of each slot.

The order is that of transformers, with bans and biases where vLLM has them:

1. Log probabilities of the raw logits, if requested.
2. Grammar bitmask, ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``.
3. Repetition penalty, then frequency and presence penalties.
4. Greedy rows: argmax; ties go to the lowest token id. Other rows: temperature, top-k, top-p,
   min-p, then a random draw.

Nothing here waits for the device: the CPU side knows from the slots which stages a step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.api.step_types import NewSequenceData
from treadle.sampling.biases import Biases
from treadle.sampling.blocks import Blocks
from treadle.sampling.draw import argmax, draw
from treadle.sampling.features import Features
from treadle.sampling.logits_edit import LogitsEdit
from treadle.sampling.logprobs import Logprobs, gather_logprobs
from treadle.sampling.masks import AllowedTokenIds, apply_bitmask
from treadle.sampling.noise import uniforms
from treadle.sampling.penalties import Penalties
from treadle.sampling.scratch import Scratch, spans
from treadle.sampling.selection import FilterGroup, SamplingMetadata
from treadle.sampling.slot_params import RowParams, SlotParams
from treadle.sampling.thresholds import apply_filters, mask_dtype
from treadle.sampling.transfer import Int32Packer, Packer
from treadle.sampling.words import BadWords

__all__ = ("SampleOutput", "Sampler")


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The sampled tokens, on the device."""

    token_ids: Tensor  # int64 [rows]
    invalid: Tensor  # bool [rows]: no valid distribution, so the token is meaningless
    logprobs: Logprobs | None = None


class Sampler:
    """Sampling state of all slots; samples one token per row. Not thread-safe.

    Call ``add_sequences`` before a slot's first ``sample``. Unused slots are greedy, as padding
    rows need. The tensors of ``SlotParams`` never move, so a CUDA graph may read them. Tables of
    logits edits can grow, so only eager steps use them.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.blocks = Blocks.of(vocab_size, self.device)
        self._slots = SlotParams(slots, vocab_size, self.device)
        # In the order in which they edit the logits.
        self._logits_edits: tuple[LogitsEdit, ...] = (
            AllowedTokenIds(vocab_size, self.device),
            BadWords(vocab_size, self.device),
            Biases(vocab_size, self.device),
            Penalties(vocab_size, self.device),
        )
        self._scratch = Scratch()
        self._packer = Packer(self.device)
        self._features = [Features(greedy=True)] * slots
        self._logprobs: dict[int, int] = {}
        self._selected: SamplingMetadata | None = None
        self.argmax_op: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.sample_op: Callable[..., tuple[Tensor, Tensor]] | None = None
        """Kernel for steps without filters; see ``treadle.testing.kernel_ops``."""
        self.bitmask_op: Callable[[Tensor, Tensor], Tensor] = apply_bitmask

    def add_sequences(self, starts: Sequence[NewSequenceData]) -> None:
        """Set the parameters of slots, replacing earlier ones, in one transfer to the device.

        The ids of ``logit_bias`` and ``allowed_token_ids`` are in the vocabulary: ``check_request`` refuses others.
        """
        if not starts:
            return
        self.remove_slots([start.slot for start in starts])
        packer = Int32Packer()
        for start in starts:
            self._features[start.slot] = Features.of(start.params, self.vocab_size)
            if start.params.logprobs is not None:
                self._logprobs[start.slot] = start.params.logprobs
            self._slots.pack(start, packer)
            for table in self._logits_edits:
                table.pack(start, packer)
        data = packer.to_device(self._packer)
        self._slots.write(data)
        for table in self._logits_edits:
            table.write(data)

    def remove_slots(self, slots: Iterable[int]) -> None:
        """Remove the parameters of slots. Unused slots are ignored. No device work."""
        for slot in slots:
            self._features[slot] = Features(greedy=True)
            self._logprobs.pop(slot, None)
            for table in self._logits_edits:
                table.pool.release(slot)
        self._selected = None

    def features(self, rows: Sequence[int]) -> Features | None:
        """Return the features for ``sample_graphable``, or ``None`` if ``sample`` is needed."""
        selection = self._select(rows)
        if selection.edits or selection.logprobs is not None:
            return None
        return selection.features

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        rows: Sequence[int],
        *,
        bitmask: Tensor | None = None,
        bitmask_rows: Tensor | None = None,
        raw: Tensor | None = None,
    ) -> SampleOutput:
        """Sample one token per row and record it for the logits edits.

        ``logits`` is ``[rows, vocab]`` and is not modified. ``slots`` and ``positions`` are int64 ``[rows]`` on the
        device; a position is the index of the new token in its sequence. ``rows`` are the same slots on the CPU side,
        each at most once. ``apply_bitmask`` describes ``bitmask``. ``raw`` are the logits for log probabilities, if a
        logits processor has edited ``logits``.
        """
        selection = self._select(rows)
        edited = self._apply_edits(logits, positions, selection, bitmask, bitmask_rows)
        tokens, invalid = self._choose(
            edited, slots, positions, selection.features, selection.groups
        )
        for table, part in selection.edits:
            table.record_sampled(part, tokens)
        logprobs = None
        if selection.logprobs is not None:
            source = (logits if raw is None else raw).index_select(0, selection.logprobs)
            token_ids = tokens.index_select(0, selection.logprobs)
            logprob_values = gather_logprobs(
                source, token_ids, max(selection.logprob_counts), self.blocks
            )
            logprobs = Logprobs(selection.logprob_rows, selection.logprob_counts, *logprob_values)
        return SampleOutput(tokens, invalid, logprobs)

    def sample_graphable(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        features: Features,
        bitmask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens int64 ``[rows]`` and invalid rows bool ``[rows]``. Can be captured.

        ``bitmask``, a row for each of ``logits``, masks them in place. The device operations depend
        only on ``features`` and the shape, and the tables that they read never move, so a CUDA graph
        stays valid when sequences are added or removed.
        """
        if bitmask is not None:
            self.bitmask_op(logits, bitmask)
        groups = [FilterGroup(None, features)] if features.filters else []
        return self._choose(logits, slots, positions, features, groups)

    def _apply_edits(
        self,
        logits: Tensor,
        positions: Tensor,
        selection: SamplingMetadata,
        bitmask: Tensor | None,
        bitmask_rows: Tensor | None,
    ) -> Tensor:
        """Return the logits after stages 2 and 3; ``logits`` itself if there are no edits."""
        if bitmask is None and not selection.edits:
            return logits
        x = self._scratch.get("edited", logits).copy_(logits)
        if bitmask is not None and bitmask_rows is None:
            self.bitmask_op(x, bitmask)
        elif bitmask is not None:
            apply_bitmask(x, bitmask, bitmask_rows)
        for table, part in selection.edits:
            table.apply(x, part, positions)
        return x

    def _choose(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        features: Features,
        groups: Sequence[FilterGroup],
    ) -> tuple[Tensor, Tensor]:
        if not features.random:
            return self._argmax(logits)
        params = self._slots.row_params(slots)
        if self.sample_op is not None and not groups:
            return self.sample_op(
                logits,
                self.blocks.width,
                params.temperature[:, 0],
                params.greedy,
                params.offsets,
                params.strides,
                positions,
                features.greedy,
            )
        weights = self._weights(logits, params, groups)
        noise = uniforms(params.offsets, params.strides, positions)
        tokens, invalid = draw(weights, noise, self.blocks)
        if features.greedy:
            tokens = torch.where(params.greedy > 0, self._argmax(logits)[0], tokens)
        return tokens, invalid

    def _argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.argmax_op is not None:
            return self.argmax_op(logits)
        return argmax(logits, self.blocks)

    def _weights(self, logits: Tensor, params: RowParams, groups: Sequence[FilterGroup]) -> Tensor:
        """Return a softmax with the entries removed by filters set to zero (stage 4)."""
        probs = self._scratch.get("probs", logits)
        for rows in spans(logits):
            # Dividing float16 by a float32 column gives float32 in one pass.
            scaled = self._scratch.get("scaled", logits[rows])
            torch.div(logits[rows], params.temperature[rows], out=scaled)
            torch.softmax(scaled, dim=-1, out=probs[rows])
        for group in groups:
            if group.rows is None:
                self._filter(probs, params, group.features)
            else:
                part = probs.index_select(0, group.rows)
                self._filter(part, params.index(group.rows), group.features)
                probs.index_copy_(0, group.rows, part)
        return probs

    def _filter(self, probs: Tensor, params: RowParams, features: Features) -> None:
        for rows in spans(probs):
            part = probs[rows]
            apply_filters(
                part,
                self._scratch.get("scaled", part, mask_dtype(part.device)),
                self.blocks,
                top_k=(params.top_k[rows].long(), features.top_k) if features.top_k else None,
                top_p=(params.top_p[rows], not features.long_top_p) if features.top_p else None,
                min_p=params.min_p[rows] if features.min_p else None,
            )

    def _select(self, rows: Sequence[int]) -> SamplingMetadata:
        """Return the metadata of ``rows``, cached: successive decode steps have the same rows."""
        if self._selected is None or self._selected.rows != rows:
            self._selected = SamplingMetadata.of(
                rows, self._features, self._logits_edits, self._logprobs, self._packer
            )
        return self._selected
