"""The interfaces of policies, executors, logits processors and other plugins of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.api.stats import EngineStats
    from treadle.api.step_types import EngineInfo, GrammarOutput, ModelRunnerOutput, SchedulerOutput

__all__ = (
    "Executor",
    "KVConnector",
    "LoRA",
    "LoRAResolver",
    "LogitsProcessor",
    "MultimodalProcessor",
    "Proposer",
    "QueuedRequest",
    "SchedulingPolicy",
    "StatLogger",
)


class QueuedRequest(Protocol):
    """The part of a request that a scheduling policy may read."""

    @property
    def id(self) -> str: ...
    @property
    def arrival_time(self) -> float:
        """Time of arrival, in seconds of the engine's monotonic clock."""

    @property
    def priority(self) -> int:
        """Requests with lower values are served first."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...


class SchedulingPolicy(Protocol):
    """Chooses the order of admission and which request to preempt."""

    def sort_key(self, request: QueuedRequest) -> tuple[float, ...]:
        """Return the sort key of a waiting request. It is constant; the smallest goes first."""

    def select_victim(self, running: Sequence[QueuedRequest]) -> int:
        """Return the index of the request to preempt. ``running`` is not empty."""


class Executor(Protocol):
    """Runs steps on one or more devices. Called from one thread."""

    def start(self) -> EngineInfo:
        """Build and load the model, and allocate the KV cache."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Launch a step without waiting for it. Outputs are in the order of launches.

        With deferred sampling (``SchedulerOutput.defer_sampling``), run up to the logits;
        ``sample_tokens`` completes the step before the next launch.
        """

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> None:
        """Complete the newest step, which has deferred sampling."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight and return its output."""

    def check_health(self) -> None:
        """Raise ``EngineDeadError`` if a worker has exited. Cheap; called when idle."""

    def shutdown(self) -> None:
        """Release everything. Called at most once, even if ``start`` has failed."""


class LogitsProcessor(Protocol):
    """Edits logits before sampling, for requests that name it in ``SamplingParams.extra_args``."""

    def validate_params(self, arguments: Any) -> None:
        """Raise ``RequestError`` if ``arguments`` (``extra_args[name]``) are invalid."""

    def apply(
        self, logits: Tensor, arguments: Sequence[Any], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return edited logits, float32 ``[rows, vocab]``. May work in place.

        ``arguments[r]`` is ``extra_args[name]`` of row ``r``, ``tokens[r]`` are its prompt and
        output ids. Only rows of requests that name this processor are passed.
        """


class Proposer(Protocol):
    """Drafts tokens for speculative decoding. Not called by this version."""

    num_speculative_tokens: int
    """Number of draft tokens per row and step, at least 1. Constant."""

    def propose(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """Return draft tokens, int64 ``[rows, lookahead]``, padded with -1.

        ``batch[r]`` are the prompt and output ids of row ``r``; it must not be modified. The same
        sequence of calls to a new proposer must give the same drafts.
        """

    def on_accepted(self, counts: Sequence[int]) -> None:
        """Receive the number of accepted drafts of each row. Called after each ``propose``."""


class KVConnector(Protocol):
    """Loads and saves pages of the KV cache. Not called by this version.

    A ``request`` has an ``id`` and ``tokens``, its prompt ids. ``pages`` are page ids below
    ``KVCacheLayout.num_pages``; ``pages[i]`` is for the ``i``-th ``page_size`` tokens.
    """

    def get_num_matched_tokens(self, request: Any) -> int:
        """Return how many leading tokens ``load`` can provide, in whole pages of this layout."""

    def load(self, request: Any, pages: Sequence[int]) -> None:
        """Fill ``pages``, at most as many as were matched, and no others."""

    def save(self, request: Any, pages: Sequence[int]) -> None:
        """Save the content of ``pages``, which may be overwritten afterwards."""


class StatLogger(Protocol):
    """Receives the engine's statistics once per step."""

    def record(self, stats: EngineStats) -> None: ...


@dataclass(frozen=True, slots=True)
class LoRA:
    """A LoRA adapter in the local folder ``path``. ``rank`` is the rank of its matrices."""

    name: str
    path: Path
    rank: int


class LoRAResolver(Protocol):
    """Finds adapters that were not named at start-up. Not called by this version."""

    def resolve(self, name: str, base_model: str) -> LoRA | None:
        """Return the adapter ``name`` of ``base_model``, or ``None`` if there is none.

        ``name`` is untrusted client input: it must not select paths outside the adapters' folder.
        Raises ``CheckpointError`` if the adapter is damaged.
        """


class MultimodalProcessor(Protocol):
    """Prepares images, audio or video for one architecture. Not called by this version."""

    def process(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the model's input for each item, in order.

        The input must depend only on the item. Raises ``RequestError`` if an item is invalid.
        """

    def placeholder_tokens(self, item: Any) -> int:
        """Return an item's prompt positions, at least 1. Raises ``RequestError`` if invalid."""
