"""The contract of the engine's collaborators: policies, processors, executors, connectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.api.stats import EngineStats
    from treadle.api.step_types import EngineFacts, StepEdits, StepPlan, StepResult

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
    def arrival(self) -> float:
        """Seconds on the engine's monotonic clock."""

    @property
    def priority(self) -> int:
        """Lower is served first."""

    @property
    def prompt_len(self) -> int: ...
    @property
    def output_len(self) -> int: ...


class SchedulingPolicy(Protocol):
    """Order of admission and choice of victim. Budget and paging stay in the core."""

    def order(self, request: QueuedRequest) -> tuple[float, ...]:
        """A sort key, constant while the request waits: the smallest is admitted first."""

    def victim(self, running: Sequence[QueuedRequest]) -> int:
        """The index of the request to preempt when pages run out; ``running`` is not empty."""


class Executor(Protocol):
    """Runs steps on one or more devices. Called from one thread."""

    def start(self) -> EngineFacts:
        """Build the model, load it, allocate pages. Returns what the scheduler must know."""

    def launch(self, plan: StepPlan) -> None:
        """Enqueue one step and return; results come in the order of launches.

        A held plan (``StepPlan.held``) is enqueued up to its logits; ``sample`` completes it
        before the next launch.
        """

    def sample(self, edits: StepEdits | None) -> None:
        """Complete the held step that was launched last."""

    def collect(self) -> StepResult:
        """Wait for the oldest step that was not collected yet."""

    def check(self) -> None:
        """Raise ``EngineDeadError`` if a worker is gone. Cheap; called when idle."""

    def stop(self) -> None:
        """Release everything. Called at most once, also after a failed ``start``."""


class LogitsProcessor(Protocol):
    """Edits logits before sampling, for requests that name it in ``SamplingParams.extra``."""

    def check(self, arguments: Any) -> None:
        """Refuse a request: raise ``RequestError`` for ``extra[name]`` that cannot work."""

    def apply(
        self, logits: Tensor, arguments: Sequence[Any], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return edited float32 ``[rows, vocab]`` logits; may work in place.

        ``arguments[r]`` is row ``r``'s ``extra[name]``, ``tokens[r]`` its ids so far, the prompt's
        first. Rows of requests that do not name this processor are not passed.
        """


class Proposer(Protocol):
    """Drafts tokens for speculative decoding. Not called by this version."""

    lookahead: int
    """Tokens drafted for each row and step, at least 1; constant."""

    def propose(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """Return int64 ``[rows, lookahead]``: what may follow ``batch[r]``, row ``r``'s ids so far,
        the prompt's first. -1 is no draft; nothing follows it in its row. Equal calls since the
        proposer was built give equal drafts, and ``batch`` is left as it is."""

    def accepted(self, counts: Sequence[int]) -> None:
        """Called after each ``propose``: how many drafts of each row the model agreed with."""


class KVConnector(Protocol):
    """Moves pages in and out of this engine. Not called by this version.

    A ``request`` has an ``id``, and ``tokens``, the ids of its prompt. ``pages`` are indices below
    ``CacheLayout.pages``; ``pages[i]`` is for the ``i``-th ``page_size`` tokens.
    """

    def lookup(self, request: Any) -> int:
        """How many tokens, from the first one on, ``load`` can bring: whole pages, of this very
        beginning and of this layout. 0 if there are none."""

    def load(self, request: Any, pages: Sequence[int]) -> None:
        """Fill ``pages``, at most as many as ``lookup`` found, and no other."""

    def save(self, request: Any, pages: Sequence[int]) -> None:
        """Keep what ``pages`` hold: they are used for something else afterwards."""


class StatLogger(Protocol):
    """Receives the engine's statistics once per step."""

    def record(self, stats: EngineStats) -> None: ...


@dataclass(frozen=True, slots=True)
class LoRA:
    """An adapter in the local folder ``path``; ``rank`` is that of its matrices."""

    name: str
    path: Path
    rank: int


class LoRAResolver(Protocol):
    """Finds adapters that were not named at start-up. Not called by this version."""

    def resolve(self, name: str, base_model: str) -> LoRA | None:
        """The adapter called ``name`` for ``base_model``, or ``None`` if there is none now.

        ``name`` is what a client sent: it may be anything, and must not lead out of the place where
        adapters are. Raises ``CheckpointError`` for one that is damaged.
        """


class MultimodalProcessor(Protocol):
    """Prepares images, audio or video for one architecture. Not called by this version."""

    def process(self, items: Sequence[Any]) -> Sequence[Any]:
        """What the model takes, one value for each item, in their order. An item gives the same
        value whenever and beside whatever it comes. Raises ``RequestError`` for a bad item."""

    def placeholder_tokens(self, item: Any) -> int:
        """Positions of the prompt that the item fills, at least 1: as many as ``process`` makes
        features of it. Raises ``RequestError`` for a bad item."""
