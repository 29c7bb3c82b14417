"""Log probabilities of the raw logits, before masks, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.api.step_types import TokenLogprobs
from treadle.sampling.blocks import Blocks
from treadle.sampling.scratch import spans
from treadle.sampling.thresholds import mask_dtype

__all__ = ("Logprobs", "gather_logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities: column 0 is the sampled token, the others are the ``k`` most probable.

    Line ``i`` is for batch row ``rows[i]``, which requested ``counts[i]`` alternatives; ``k`` is
    the largest count. The sampled token may be among the alternatives as well.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    ids: Tensor  # int64 [n, 1 + k]
    values: Tensor  # float32 [n, 1 + k]
    ranks: Tensor  # int64 [n], from 1; equal logits have the same rank

    def cpu(self) -> Logprobs:
        """Return a copy on the CPU side, valid once the device's stream has reached it."""
        # torch copies to pinned memory if the copy is non-blocking.
        ids, values, ranks = (
            x.to("cpu", non_blocking=True) for x in (self.ids, self.values, self.ranks)
        )
        return Logprobs(self.rows, self.counts, ids, values, ranks)

    def to_host(self) -> list[TokenLogprobs]:
        """Return one entry per line, with the requested number of alternatives.

        Waits for the device unless the tensors are on the CPU side.
        """
        lines = zip(
            self.counts, self.ids.tolist(), self.values.tolist(), self.ranks.tolist(), strict=True
        )
        return [
            TokenLogprobs(ids[: 1 + count], values[: 1 + count], rank)
            for count, ids, values, rank in lines
        ]


def gather_logprobs(
    logits: Tensor, tokens: Tensor, k: int, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and log probabilities of ``tokens`` and the top ``k``, and ranks of ``tokens``.

    ``logits`` is ``[n, vocab]`` of any float type, ``tokens`` int64 ``[n]``; returns int64 and
    float32 ``[n, 1 + k]`` and int64 ``[n]``.
    """
    # In pieces, since float32 copies of the thousands of positions of a prompt could not fit.
    parts = [
        gather_piece(logits[rows].float(), tokens[rows], k, blocks)
        for rows in spans(logits, bounded=True)
    ]
    if len(parts) == 1:
        return parts[0]
    ids, values, ranks = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return ids, values, ranks


def gather_piece(
    logits: Tensor, tokens: Tensor, k: int, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    ids = tokens.unsqueeze(1)
    token_logits = values = logits.gather(1, ids)
    if k:
        top, top_ids = blocks.largest(logits, min(k, logits.shape[1]))
        values = torch.cat((values, top), dim=1)
        ids = torch.cat((ids, top_ids), dim=1)
    is_larger = torch.empty_like(logits, dtype=mask_dtype(logits.device))
    ranks = torch.gt(logits, token_logits, out=is_larger).sum(dim=-1).long().add_(1)
    # Normalizing only the returned values avoids a log_softmax over the vocabulary.
    max_logits = logits.amax(dim=-1, keepdim=True)
    total = (logits - max_logits).exp_().sum(dim=-1, keepdim=True)
    return ids, values - max_logits - total.log_(), ranks


def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> Logprobs:
    """Return log probabilities of prompt tokens, with ``k`` alternatives.

    ``logits[i]`` (``[n, vocab]``) predicts ``targets[i]`` (int64 ``[n]``). Line ``i`` is row ``i``.
    """
    n, vocab_size = logits.shape
    blocks = Blocks.of(vocab_size, logits.device)
    return Logprobs(range(n), [k] * n, *gather_logprobs(logits, targets, k, blocks))
