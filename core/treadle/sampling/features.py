"""Which sampling stages a step needs, derived on the CPU side from the rows' parameters."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.api.sampling_params import SamplingParams
from treadle.sampling.slot_params import effective_temperature
from treadle.sampling.thresholds import HEAD

__all__ = ("Features",)


@dataclass(frozen=True, slots=True)
class Features:
    """The stages of ``Sampler.sample_graphable``. Hashable: the key of captured CUDA graphs.

    A step may run with more features than its rows need (their union, ``|``), with the same tokens.
    """

    greedy: bool = False
    random: bool = False
    top_k: int = 0
    """0: off. Up to ``HEAD``: how many largest values to list. Above: use a binary search."""
    top_p: bool = False
    long_top_p: bool = False
    """Whether some row has top-p without a top-k of at most ``HEAD``."""
    min_p: bool = False

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Features:
        if effective_temperature(params) == 0.0:
            return cls(greedy=True)
        bounded = 0 < params.top_k < vocab_size
        # Only three list sizes, 32, 64 and 128, to capture few graphs.
        size = min(HEAD, max(32, 1 << (params.top_k - 1).bit_length())) if bounded else 0
        if bounded and params.top_k > HEAD:
            size = HEAD + 1
        top_p = params.top_p < 1.0
        return cls(
            random=True,
            top_k=size,
            top_p=top_p,
            long_top_p=top_p and not 0 < size <= HEAD,
            min_p=params.min_p > 0.0,
        )

    def __or__(self, other: Features) -> Features:
        return Features(
            self.greedy or other.greedy,
            self.random or other.random,
            max(self.top_k, other.top_k),
            self.top_p or other.top_p,
            self.long_top_p or other.long_top_p,
            self.min_p or other.min_p,
        )

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p or self.min_p

    @property
    def needs_thresholds(self) -> bool:
        """Whether a filter needs a binary search, with many passes over the vocabulary."""
        return self.top_k > HEAD or self.long_top_p
