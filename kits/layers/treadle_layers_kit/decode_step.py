"""The operation ``decode_step``: a whole step of a decoder in one call, where a plugin has it.

Unlike the operations of ``treadle_layers_kit.kernel_ops`` it is no function of tensors: it takes over a
model whose layers it knows, with its weights and its cache. A plugin offers it by ``treadle_kernel_op``;
what its offer loads is a ``DecodeStep``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor, nn

__all__ = ("DECODE_STEP", "DecodePlan", "DecodeProgram", "DecodeStep", "DecoderFacts")

DECODE_STEP = "decode_step"


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """What a plan needs to know besides the model, once the cache is allocated."""

    page_size: int
    max_model_len: int
    max_rows: int
    max_tokens: int
    """Tokens of one step, at most."""
    threads: int
    attention: Sequence[str]
    """By ``Attention.attn_group``: the name of the backend that was chosen."""
    cache_groups: Sequence[int]
    """By ``Attention.attn_group``: the index of the page tables."""
    page_tables: Sequence[np.ndarray]
    """int32 ``[slots, columns]`` for each KV cache group; read in every step, where they are."""
    last_tokens: Tensor
    """int64 ``[slots]``: the id that each slot sampled last; read in every step, where it is,
    and written by ``argmax``."""


class DecodeProgram(Protocol):
    """A decoder that is ready to run. Use it from one thread."""

    def run(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        samples: Sequence[bool],
        num_decodes: int,
        prompt_ids: Sequence[int],
    ) -> Tensor:
        """Write the keys and values of a step, and return logits.

        The arguments are those of a ``SchedulerOutput``. Returns float32 ``[sampled rows, vocab]``, of the
        last token of each row that samples, valid until the next call.
        """

    def argmax(self) -> Tensor:
        """Return int64 ``[rows]``, the ids with the largest logits of the last ``run``, all of whose rows sample.

        They are written to ``last_tokens``, too. Where no token has the largest logit, -1 is returned and 0 written.
        The result is valid until the next call.
        """

    def close(self) -> None:
        """End the threads and free the memory. The program is not used again."""


class DecodePlan(Protocol):
    """A model that can be run, before its weights are loaded."""

    def compile(self, facts: DecoderFacts) -> tuple[DecodeProgram, str]:
        """Return the program of the loaded model, and a sentence about it for the start-up report.

        Raises ``TreadleError`` if it cannot be had.
        """


class DecodeStep(Protocol):
    """What an offer for ``decode_step`` loads."""

    def __call__(self, model: nn.Module) -> DecodePlan | str:
        """Return the plan for a model whose weights are still empty, or why there is none.

        A plan may keep linear layers from laying out their weights anew (``PlainLinear.packs``), and have four-bit
        weights laid out row by row (``Int4Packing.by_rows``).
        """
