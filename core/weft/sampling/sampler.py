"""From logits to tokens, for a batch of slots that each have their own parameters.

The order is transformers', with vLLM's place for bans and biases:

1. log probabilities of the raw logits, where asked for;
2. grammar bitmask, ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``;
3. repetition, then frequency and presence penalty;
4. greedy rows: the likeliest token, the lowest id among equals. Other rows: temperature, then
   top-k, top-p, min-p, then a draw.

Nothing here waits for the device. What a step needs is decided on the host, from the slots alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.engine.plan import SlotStart
from weft.errors import RequestError
from weft.sampling.biases import Biases
from weft.sampling.blocks import Blocks
from weft.sampling.draw import draw, likeliest
from weft.sampling.features import Features
from weft.sampling.logprobs import Logprobs, gather_logprobs
from weft.sampling.masks import Allowed, apply_bitmask
from weft.sampling.noise import uniforms
from weft.sampling.params import SamplingParams
from weft.sampling.parcel import Parcel, upload
from weft.sampling.penalties import Penalties
from weft.sampling.pool import Pool
from weft.sampling.slots import Cells, Slots
from weft.sampling.thresholds import filtered
from weft.sampling.words import BadWords

__all__ = ("SampleOutput", "Sampler", "check_ids")


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Tensors on the device."""

    tokens: Tensor  # int64 [rows]
    bad: Tensor  # bool [rows]: no usable distribution; the token means nothing, fail the request
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """What the rows of a step ask for. Tensors are int64 ``[2, n]``: batch rows, table rows."""

    rows: list[int]
    features: Features
    allowed: Tensor | None
    words: Tensor | None
    biases: Tensor | None
    penalties: Tensor | None
    logprobs: Tensor | None
    logprob_counts: list[int]
    logprob_rows: list[int]

    @property
    def edits(self) -> bool:
        parts = (self.allowed, self.words, self.biases, self.penalties)
        return any(part is not None for part in parts)


class Sampler:
    """Samples one token per row; keeps what that takes for every slot.

    Not thread-safe. ``open`` a slot before its first ``sample``; a slot that was never opened is
    greedy, which is what a padding slot needs. Tables of ``slots`` rows never move, so a captured
    graph may read them; tables of the other parameters grow and belong to eager steps.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.blocks = Blocks.of(vocab_size, self.device)
        self._slots = Slots(slots, vocab_size, self.device)
        self._allowed = Allowed(vocab_size, self.device)
        self._words = BadWords(vocab_size, self.device)
        self._biases = Biases(vocab_size, self.device)
        self._penalties = Penalties(vocab_size, self.device)
        self._tables = (self._allowed, self._words, self._biases, self._penalties)
        self._features = [Features(greedy=True)] * slots
        self._logprobs: dict[int, int] = {}
        self._selected: Selection | None = None

    def open(self, starts: Sequence[SlotStart]) -> None:
        """Take over the parameters of new slots, in one transfer.

        A slot may be opened again without ``close``. Raises ``RequestError`` for a token id outside
        of the vocabulary; then no slot has changed.
        """
        if not starts:
            return
        for start in starts:
            check_ids(start.params, self.vocab_size)
        self.close([start.slot for start in starts])
        parcel = Parcel()
        for start in starts:
            self._features[start.slot] = Features.of(start.params, self.vocab_size)
            if start.params.logprobs is not None:
                self._logprobs[start.slot] = start.params.logprobs
            self._slots.pack(start, parcel)
            for table in self._tables:
                table.pack(start, parcel)
        data = parcel.ship(self.device)
        self._slots.write(data)
        for table in self._tables:
            table.write(data)

    def close(self, slots: Iterable[int]) -> None:
        """Forget slots; those that are not open are ignored. Touches no device."""
        for slot in slots:
            self._features[slot] = Features(greedy=True)
            self._logprobs.pop(slot, None)
            for table in self._tables:
                table.pool.give(slot)
        self._selected = None

    def features(self, rows: Sequence[int]) -> Features | None:
        """What ``sample_graphable`` needs for these slots; ``None`` if they need ``sample``."""
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
        """Sample one token per row and remember it where a parameter looks back.

        ``logits`` is ``[rows, vocab]`` and is not modified; ``slots`` and ``positions`` are int64
        ``[rows]`` on the device, a position being the index of the new token in its sequence.
        ``rows`` holds the same slots for the host, each at most once. ``bitmask`` is described in
        ``apply_bitmask``. ``raw`` are the logits for log probabilities if a plugin has edited
        ``logits``.
        """
        selection = self._select(rows)
        edited = self._edited(logits, positions, selection, bitmask, bitmask_rows)
        tokens, bad = self.sample_graphable(edited, slots, positions, selection.features)
        for table, part in ((self._penalties, selection.penalties), (self._words, selection.words)):
            if part is not None:
                table.accept(part[1], tokens.index_select(0, part[0]))
        logprobs = None
        if selection.logprobs is not None:
            asked = selection.logprobs[0]
            source = (logits if raw is None else raw).index_select(0, asked)
            most = max(selection.logprob_counts)
            found = gather_logprobs(source, tokens.index_select(0, asked), most)
            logprobs = Logprobs(selection.logprob_rows, selection.logprob_counts, *found)
        return SampleOutput(tokens, bad, logprobs)

    def sample_graphable(
        self, logits: Tensor, slots: Tensor, positions: Tensor, features: Features
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 ``[rows]`` and bad rows bool ``[rows]``, by fixed device operations.

        Nothing but ``features`` and the shape selects the operations, and every table they read
        stays at its address: a captured graph may be replayed after slots were opened and closed.
        """
        if not features.random:
            return likeliest(logits, self.blocks)
        cells = self._slots.cells(slots)
        weights = self._weights(logits, cells, features)
        noise = uniforms(cells.offsets, cells.strides, positions)
        tokens, bad = draw(weights, noise, self.blocks)
        if features.greedy:
            tokens = torch.where(cells.greedy > 0, likeliest(logits, self.blocks)[0], tokens)
        return tokens, bad

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
        """The probabilities that ``sample`` draws from: float32 ``[rows, vocab]``.

        Greedy rows are one-hot. Remembers nothing.
        """
        selection = self._select(rows)
        edited = self._edited(logits, positions, selection, bitmask, bitmask_rows)
        cells = self._slots.cells(slots)
        weights = self._weights(edited, cells, selection.features)
        probs = weights / weights.sum(dim=-1, keepdim=True)
        if selection.features.greedy:
            best = likeliest(edited, self.blocks)[0].unsqueeze(1)
            one_hot = torch.zeros_like(probs).scatter_(1, best, 1.0)
            probs = torch.where(cells.greedy.unsqueeze(1) > 0, one_hot, probs)
        return probs

    def _edited(
        self,
        logits: Tensor,
        positions: Tensor,
        selection: Selection,
        bitmask: Tensor | None,
        bitmask_rows: Tensor | None,
    ) -> Tensor:
        """Logits after steps 2 and 3; the same tensor if there is nothing to do."""
        if bitmask is None and not selection.edits:
            return logits
        x = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if bitmask is not None:
            apply_bitmask(x, bitmask, bitmask_rows)
        if selection.allowed is not None:
            self._allowed.apply(x, *selection.allowed)
        if selection.words is not None:
            self._words.apply(x, *selection.words)
        if selection.biases is not None:
            asked, owned = selection.biases
            self._biases.apply(x, asked, owned, positions.index_select(0, asked))
        if selection.penalties is not None:
            self._penalties.apply(x, *selection.penalties)
        return x

    def _weights(self, logits: Tensor, cells: Cells, features: Features) -> Tensor:
        # A float16 divided by a float32 column is a float32, in one pass.
        probs = (logits / cells.temperature).softmax(dim=-1)
        return filtered(
            probs,
            self.blocks,
            top_k=(cells.top_k.long(), features.top_k) if features.top_k else None,
            top_p=(cells.top_p, not features.long_top_p) if features.top_p else None,
            min_p=cells.min_p if features.min_p else None,
        )

    def _select(self, rows: Sequence[int]) -> Selection:
        """The selection of ``rows``; consecutive decode steps nearly always repeat the last one."""
        if self._selected is not None and self._selected.rows == rows:
            return self._selected
        features = Features()
        for kind in {self._features[slot] for slot in rows}:
            features |= kind
        pairs = [self._owned(table.pool, rows) for table in self._tables]
        asked = (
            [row for row, slot in enumerate(rows) if slot in self._logprobs]
            if self._logprobs
            else []
        )
        counts = [self._logprobs[rows[row]] for row in asked]
        allowed, words, biases, penalties, logprobs = self._upload([*pairs, asked * 2])
        self._selected = Selection(
            rows=list(rows),
            features=features,
            allowed=allowed,
            words=words,
            biases=biases,
            penalties=penalties,
            logprobs=logprobs,
            logprob_rows=asked,
            logprob_counts=counts,
        )
        return self._selected

    @staticmethod
    def _owned(pool: Pool, rows: Sequence[int]) -> list[int]:
        """Batch rows whose slots are in the pool, then their rows of the pool."""
        if not len(pool):
            return []
        batch = [row for row, slot in enumerate(rows) if slot in pool]
        return batch + [pool[rows[row]] for row in batch]

    def _upload(self, lists: list[list[int]]) -> list[Tensor | None]:
        """Each list as int64 ``[2, n]`` on the device, in one transfer; ``None`` for an empty one."""
        flat = [value for values in lists for value in values]
        if not flat:
            return [None] * len(lists)
        data = upload(torch.tensor(flat, dtype=torch.int64), self.device)
        parts: list[Tensor | None] = []
        start = 0
        for values in lists:
            end = start + len(values)
            parts.append(data[start:end].view(2, -1) if values else None)
            start = end
        return parts


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``RequestError`` if a parameter names a token outside of the vocabulary."""
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
    ):
        if ids and max(ids) >= vocab_size:
            raise RequestError(
                f"{name} has token {max(ids)}; the model's vocabulary ends at {vocab_size - 1}",
                param=name,
            )
