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

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import NewSequenceData
from treadle.errors import RequestError
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
from treadle.sampling.transfer import Int32Packer
from treadle.sampling.words import BadWords

__all__ = ("SampleOutput", "Sampler", "check_ids")


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
        self._features = [Features(greedy=True)] * slots
        self._logprobs: dict[int, int] = {}
        self._selected: SamplingMetadata | None = None
        self.argmax_op: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        self.sample_op: Callable[..., tuple[Tensor, Tensor]] | None = None
        """Kernel for steps without filters; see ``treadle.testing.kernel_ops``."""

    def add_sequences(self, starts: Sequence[NewSequenceData]) -> None:
        """Set the parameters of slots, replacing earlier ones, in one transfer to the device.

        Raises ``RequestError``, without changing any slot, if a token id is outside the vocabulary.
        """
        if not starts:
            return
        for start in starts:
            check_ids(start.params, self.vocab_size)
        self.remove_slots([start.slot for start in starts])
        parcel = Int32Packer()
        for start in starts:
            self._features[start.slot] = Features.of(start.params, self.vocab_size)
            if start.params.logprobs is not None:
                self._logprobs[start.slot] = start.params.logprobs
            self._slots.pack(start, parcel)
            for table in self._logits_edits:
                table.pack(start, parcel)
        data = parcel.to_device(self.device)
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
        """Sample one token per row and record it for the logits edits that need it.

        ``logits`` is ``[rows, vocab]`` and is not modified. ``slots`` and ``positions`` are int64
        ``[rows]`` on the device; a position is the index of the new token in its sequence. ``rows``
        are the same slots on the CPU side, each at most once. ``apply_bitmask`` describes
        ``bitmask``. ``raw`` are the logits for log probabilities, if a logits processor has edited
        ``logits``.
        """
        selection = self._select(rows)
        edited = self._apply_edits(logits, positions, selection, bitmask, bitmask_rows)
        tokens, bad = self._choose(edited, slots, positions, selection.features, selection.groups)
        for table, part in selection.edits:
            if table.needs_sampled_tokens:
                table.record_sampled(part, tokens)
        logprobs = None
        if selection.logprobs is not None:
            source = (logits if raw is None else raw).index_select(0, selection.logprobs)
            chosen = tokens.index_select(0, selection.logprobs)
            found = gather_logprobs(source, chosen, max(selection.logprob_counts), self.blocks)
            logprobs = Logprobs(selection.logprob_rows, selection.logprob_counts, *found)
        return SampleOutput(tokens, bad, logprobs)

    def sample_graphable(
        self, logits: Tensor, slots: Tensor, positions: Tensor, features: Features
    ) -> tuple[Tensor, Tensor]:
        """Return tokens int64 ``[rows]`` and invalid rows bool ``[rows]``. Can be captured.

        The device operations depend only on ``features`` and the shape, and the tables that they
        read never move, so a CUDA graph stays valid when sequences are added or removed.
        """
        groups = [FilterGroup(None, features)] if features.filters else []
        return self._choose(logits, slots, positions, features, groups)

    def distribution(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        rows: Sequence[int],
        *,
        bitmask: Tensor | None = None,
        bitmask_rows: Tensor | None = None,
    ) -> Tensor:
        """Return the probabilities that ``sample`` draws from: float32 ``[rows, vocab]``.

        Greedy rows are one-hot. Records nothing.
        """
        selection = self._select(rows)
        edited = self._apply_edits(logits, positions, selection, bitmask, bitmask_rows)
        cells = self._slots.cells(slots)
        weights = self._weights(edited, cells, selection.groups)
        probs = weights / weights.sum(dim=-1, keepdim=True)
        if selection.features.greedy:
            best = argmax(edited, self.blocks)[0].unsqueeze(1)
            one_hot = torch.zeros_like(probs).scatter_(1, best, 1.0)
            probs = torch.where(cells.greedy.unsqueeze(1) > 0, one_hot, probs)
        return probs

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
        if bitmask is not None:
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
        cells = self._slots.cells(slots)
        if self.sample_op is not None and not groups:
            return self.sample_op(
                logits,
                self.blocks.width,
                cells.temperature[:, 0],
                cells.greedy,
                cells.offsets,
                cells.strides,
                positions,
                features.greedy,
            )
        weights = self._weights(logits, cells, groups)
        noise = uniforms(cells.offsets, cells.strides, positions)
        tokens, bad = draw(weights, noise, self.blocks)
        if features.greedy:
            tokens = torch.where(cells.greedy > 0, self._argmax(logits)[0], tokens)
        return tokens, bad

    def _argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.argmax_op is not None:
            return self.argmax_op(logits)
        return argmax(logits, self.blocks)

    def _weights(self, logits: Tensor, cells: RowParams, groups: Sequence[FilterGroup]) -> Tensor:
        """Return a softmax with the entries removed by filters set to zero (stage 4)."""
        probs = self._scratch.get("probs", logits)
        for rows in spans(logits):
            # Dividing float16 by a float32 column gives float32 in one pass.
            scaled = self._scratch.get("scaled", logits[rows])
            torch.div(logits[rows], cells.temperature[rows], out=scaled)
            torch.softmax(scaled, dim=-1, out=probs[rows])
        for group in groups:
            if group.rows is None:
                self._filter(probs, cells, group.features)
            else:
                part = probs.index_select(0, group.rows)
                self._filter(part, cells.index(group.rows), group.features)
                probs.index_copy_(0, group.rows, part)
        return probs

    def _filter(self, probs: Tensor, cells: RowParams, features: Features) -> None:
        for rows in spans(probs):
            part = probs[rows]
            apply_filters(
                part,
                self._scratch.get("scaled", part, mask_dtype(part.device)),
                self.blocks,
                top_k=(cells.top_k[rows].long(), features.top_k) if features.top_k else None,
                top_p=(cells.top_p[rows], not features.long_top_p) if features.top_p else None,
                min_p=cells.min_p[rows] if features.min_p else None,
            )

    def _select(self, rows: Sequence[int]) -> SamplingMetadata:
        """Return the metadata of ``rows``, cached: successive decode steps have the same rows."""
        if self._selected is None or self._selected.rows != rows:
            self._selected = SamplingMetadata.of(
                rows, self._features, self._logits_edits, self._logprobs, self.device
            )
        return self._selected


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``RequestError`` if a parameter contains a token id outside the vocabulary."""
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
    ):
        if ids and max(ids) >= vocab_size:
            raise RequestError(
                f"{name} has token {max(ids)}; the highest id of the model is {vocab_size - 1}",
                param=name,
            )
