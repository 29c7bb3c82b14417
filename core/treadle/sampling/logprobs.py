"""Log probabilities of the model's own distribution: before masks, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.api.step_types import TokenLogprobs
from treadle.sampling.blocks import Blocks
from treadle.sampling.scratch import spans
from treadle.sampling.thresholds import mask_dtype
from treadle.sampling.transfer import download

__all__ = ("Logprobs", "gather_logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Column 0 is the chosen token, the others are the likeliest ``k`` in falling order.

    ``rows[i]`` is the batch row of line ``i`` and ``counts[i]`` how many alternatives it asked
    for; lines are as wide as the largest count. The chosen token comes up again among the
    alternatives if it is one of them.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    ids: Tensor  # int64 [n, 1 + k]
    values: Tensor  # float32 [n, 1 + k]
    ranks: Tensor  # int64 [n], from 1; tokens that tie share the smallest

    def cpu(self) -> Logprobs:
        """A copy on the host, complete once the device's queue has reached it."""
        return Logprobs(
            self.rows, self.counts, download(self.ids), download(self.values), download(self.ranks)
        )

    def to_host(self) -> list[TokenLogprobs]:
        """One entry per line, each with as many alternatives as it asked for.

        Waits for the device unless the tensors are on the host already.
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
    """Ids, log probabilities and rank of ``tokens`` and of the ``k`` likeliest.

    ``logits`` is ``[n, vocab]`` of any float type, ``tokens`` int64 ``[n]``; returns int64 and
    float32 ``[n, 1 + k]`` and int64 ``[n]``.
    """
    # In pieces: a prompt may have thousands of positions, and their float32 copies would not fit.
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
    chosen = values = logits.gather(1, ids)
    if k:
        top, top_ids = blocks.largest(logits, min(k, logits.shape[1]))
        values = torch.cat((values, top), dim=1)
        ids = torch.cat((ids, top_ids), dim=1)
    above = torch.empty_like(logits, dtype=mask_dtype(logits.device))
    ranks = torch.gt(logits, chosen, out=above).sum(dim=-1).long().add_(1)
    # Subtracting from the few that are wanted spares a log_softmax the size of the vocabulary.
    most = logits.amax(dim=-1, keepdim=True)
    total = (logits - most).exp_().sum(dim=-1, keepdim=True)
    return ids, values - most - total.log_(), ranks


def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> Logprobs:
    """Log probabilities of the tokens that do follow in a prompt.

    ``logits[i]`` (``[n, vocab]``) predicts ``targets[i]`` (int64 ``[n]``). Line ``i`` has row ``i``.
    """
    n, vocab_size = logits.shape
    blocks = Blocks.of(vocab_size, logits.device)
    return Logprobs(range(n), [k] * n, *gather_logprobs(logits, targets, k, blocks))
